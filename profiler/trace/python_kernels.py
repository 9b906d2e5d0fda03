"""Torch without its kernels in Python for the meta device, until one of them may be called.

`import torch` registers a Python function for most ops on that device, and imports what these are made of: a third of
its CPU time.  A trace makes nearly all outputs itself (`profiler.trace.shapes`), so a program that only traces imports
torch by `import_torch`, and what runs an op without data comes after `load_kernels`.

The modules of which these functions are made import each other, and others of torch, in circles that only torch's own
order resolves.  So they are loaded before any module of torch is imported that a trace does not need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRATIONS = "torch._meta_registrations"
_NEEDED = ("torch.utils.flop_counter", "torch.utils.module_tracker", "torch.utils._device")
"""What a trace imports of torch beside `import torch`, and that can be imported before the registrations."""
_IN_CPP = frozenset({"aten::empty_strided", "aten::empty.memory_format", "aten::constant_pad_nd"})
"""Ops that have no kernel in Python, beside views."""


class _Loading(MetaPathFinder, Loader):
    """Loads the kernels before the next module of torch that a trace does not need."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import a module of torch, None of others."""
        return ModuleSpec(name, self) if name.startswith("torch.") and name not in _NEEDED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, imported by others: the kernels may have imported it already."""
        load_kernels()
        module = importlib.import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Have the module say how it was imported; all else is done."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_loading = _Loading()


def import_torch() -> None:
    """Import torch without its kernels in Python, unless it is there already."""
    if "torch" in sys.modules:
        return
    # No module, as `inspect` looks into all of them while torch is imported.
    stand_in: Any = object()
    sys.modules[_REGISTRATIONS] = stand_in
    try:
        importlib.import_module("torch")
    finally:
        del sys.modules[_REGISTRATIONS]
    sys.meta_path.insert(0, _loading)


def load_kernels() -> None:
    """Register the kernels that `import_torch` has left out."""
    if _loading in sys.meta_path:
        sys.meta_path.remove(_loading)
        importlib.import_module(_REGISTRATIONS)


def load_kernel(op: Any) -> None:
    """Register all kernels, unless an op has none in Python."""
    if _loading in sys.meta_path and not (op.is_view or op.name() in _IN_CPP):
        load_kernels()
