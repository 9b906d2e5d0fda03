"""Small copies from the host to a GPU, which must not make the host wait for what the GPU has to do before.

A copy from pageable memory does: `Tensor.to` returns when it is done, and it is done in the order of the stream.  One
from pinned memory need not.  The pinned memory may be let go of at once: PyTorch's allocator gives it to nobody before
the copy is done, as it records an event after a non-blocking one (`CachingHostAllocator.h`; read in 2.11 and 2.13).
"""

import torch
from torch import Tensor

from runtime.torch_compat import is_fake


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; one of the host's gets there behind what the device has to do, without a wait."""
    if device.type != "cuda" or tensor.device.type != "cpu" or is_fake(tensor):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
