"""Batch normalisation over the batches of all ranks, on the CPU too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.bridges.horovod.torch.autograd import allreduce
from paceline.bridges.horovod.torch.mpi_ops import Sum, size


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the mean and the variance of the batches of all ranks.

    Arguments as in `torch.nn.BatchNorm1d`. Batches of ranks may have different sizes.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch of shape (N, C, ...)."""
        self._check_input_dim(input)
        if size() == 1 or not (self.training or not self.track_running_stats):
            # a step forward of torch's own class, with its count of batches
            return super().forward(input)
        others = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        counted = input.new_tensor([input.numel() / input.size(1)])
        # first the mean, then squares around it: a mean of squares would lose digits
        first = allreduce(torch.cat([input.sum(others), counted]), name="sync_bn.sum", op=Sum)
        count = first[-1].detach()
        mean = first[:-1] / count
        centred = input - mean.view(shape)
        squares = allreduce(centred.square().sum(others), name="sync_bn.squares", op=Sum)
        variance = squares / count
        if self.training and self.track_running_stats:
            self._update_running_stats(mean.detach(), variance.detach(), float(count))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is None:
            return normal
        return torch.addcmul(self.bias.view(shape), normal, self.weight.view(shape))

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = (
            self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        )
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), factor)
