"""Private parts of torch that say whose memory a tensor has, and whether it was written to.

All uses in `parallel/` go through this module, so that a new version of torch breaks it here alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Key of the memory of a tensor: the same for all views of it.

    Another storage may get the same key once this one is freed. So code that keeps keys keeps the
    storages, too.
    """
    # `_cdata` is private: the address of the storage's C++ object. Its public counterpart,
    # `data_ptr`, is 0 for all tensors on the device "meta". If `_cdata` is gone, this raises.
    return int(tensor.untyped_storage()._cdata)


def set_version(tensor: Tensor, version: int) -> None:
    """Set the version counter of a tensor, by which autograd sees changes of what it has saved."""
    # Private; FSDP of torch uses the same function. torch.autograd has it as a context manager,
    # `_unsafe_preserve_version_counter`. Without it, gathering parameters again would count as a
    # change in place, and every backward with zero=3 would raise.
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
