"""Buffers that a block's forward changes, and a forward that runs again with them as they were."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from profiler.early_stops import is_early_stop

BufferSite = tuple[nn.Module, str]
"""A module, and the name of a buffer of its own."""


def buffer_states(block: nn.Module) -> dict[BufferSite, tuple[int, int, int, int]]:
    """Return of each buffer which tensor and storage it is, how often it was changed, and its bytes."""
    return {
        (module, name): (id(buffer), buffer.untyped_storage()._cdata, buffer._version, buffer.nbytes)
        for module in block.modules()
        if module._buffers  # few have any, and `named_buffers` takes long to find none
        for name, buffer in module.named_buffers(recurse=False)
    }


class WithBuffers(AbstractContextManager[None, bool]):
    """Surrounds a block's forward that runs again, with its buffers as they were; lives as long as its graph."""

    def __init__(self, around: AbstractContextManager[None], copies: Mapping[BufferSite, Tensor]) -> None:
        self.around, self.copies, self.stack = around, copies, ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(self.around)
        for (module, name), old in self.copies.items():
            self.stack.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = old.clone()

    def __exit__(self, *error: Any) -> bool:
        self.stack.__exit__(*error)
        return is_early_stop(error[1])
