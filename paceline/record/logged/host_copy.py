"""A copy of a tensor on its way to the host, which is read once it has arrived."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of the current content of a tensor.

    With `shared`, a tensor that is on the host already isn't copied. No one else may change it
    then.
    """

    def __init__(self, tensor: Tensor, *, shared: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # Only a copy into pinned memory is asynchronous. The event tells when it is done.
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._here = tensor.cpu() if shared or tensor.device.type != "cpu" else tensor.clone()

    def has_arrived(self) -> bool:
        """Whether the copy has arrived, so that reading it would not wait."""
        return self._event is None or self._event.query()

    def read_tensor(self) -> Tensor:
        """Return the tensor on the host. Waits for the copy if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._here
