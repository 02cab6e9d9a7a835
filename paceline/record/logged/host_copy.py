"""A tensor on its way to the host, which is read once it has arrived: nobody waits for a device
meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The present content of a tensor.

    With `shared` a tensor of the host isn't copied: nobody else may change it.
    """

    def __init__(self, there: Tensor, *, shared: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        if there.is_cuda:
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(
                there, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(there.device))
        else:
            self._here = there.cpu() if shared or there.device.type != "cpu" else there.clone()

    def done(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Return the tensor on the host, and wait for it if need be."""
        if self._event is not None:
            self._event.synchronize()
        return self._here
