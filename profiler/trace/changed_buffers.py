"""What a block's forward changes, and a forward that runs again with them as they were."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from profiler.early_stops import is_early_stop
from profiler.remembered_attributes import RememberedAttributes

BufferSite = tuple[nn.Module, str]
"""A module, and the name of a buffer of its own."""


def buffer_states(block: nn.Module, last: Mapping[int, int]) -> dict[BufferSite, tuple[int, int, int, int, int]]:
    """Return of each buffer which tensor and storage it is, how often it was changed, its bytes, and the number of the
    `last` write into its storage.
    """
    return {
        (module, name): (
            id(buffer),
            key := buffer.untyped_storage()._cdata,
            buffer._version,
            buffer.nbytes,
            last.get(key, 0),
        )
        for module in block.modules()
        if module._buffers  # few have any, and `named_buffers` takes long to find none
        for name, buffer in module.named_buffers(recurse=False)
    }


@dataclass(frozen=True)
class KnownChanges:
    """What earlier passes have seen forwards change."""

    buffers: Mapping[str, Sequence[BufferSite]] = field(default_factory=dict)
    """By path of a block."""
    attributes: bool = False
    """Whether any plain attribute is changed."""


NO_CHANGES = KnownChanges()


class AsBefore(AbstractContextManager[None, bool]):
    """Surrounds a block's forward that runs again, with what it changes as it was; lives as long as its graph."""

    def __init__(
        self,
        begin: Callable[[], None],
        around: AbstractContextManager[None],
        known: KnownChanges,
        root: nn.Module,
        path: str,
    ) -> None:
        """`begin` is called before there are other tensors in the places of buffers, which are there `around` all."""
        self.begin, self.around, self.stack = begin, around, ExitStack()
        self.copies = {site: site[0].get_buffer(site[1]).clone() for site in known.buffers.get(path, ())}
        self._attributes = RememberedAttributes(root.get_submodule(path)) if known.attributes else None

    def end_first(self) -> None:
        """Note what the forward has changed as it ran first."""
        if self._attributes is not None:
            self._attributes.end()

    def settings(self, first: AbstractContextManager[None]) -> dict[str, Any]:
        """Return arguments of `checkpoint`, with what is around the forward as it runs `first`."""
        made = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        return {**made, "context_fn": lambda: (first, self)}

    def __enter__(self) -> None:
        self.begin()
        with ExitStack() as stack:
            for (module, name), old in self.copies.items():
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = old.clone()
            stack.enter_context(self.around)
            if self._attributes is not None:
                stack.enter_context(self._attributes.restored())
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool:
        self.stack.__exit__(*error)
        return is_early_stop(error[1])
