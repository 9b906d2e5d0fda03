"""What an op that imports modules leaves in reference cycles goes at once; what the model leaves there is noted."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType

import pytest

from profiler.garbage_collection import without_garbage_collection
from profiler.trace.ops_that_import import OpRunner


class Storage:
    """Stands for a storage; the cycle that it is in holds it."""

    def __init__(self, live: weakref.WeakSet[Storage]) -> None:
        self.itself = self
        live.add(self)


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_only_cycles_of_the_import_may_go(imports: bool, others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, live = weakref.WeakSet[Storage](), weakref.WeakSet[Storage]()

    def op(argument: int, *, scale: int) -> int:
        if imports:
            monkeypatch.setitem(sys.modules, "imported_by_an_op", ModuleType("imported_by_an_op"))
        Storage(frames)
        return argument * scale

    with without_garbage_collection():
        if others:
            Storage(live)
        runner = OpRunner(live)
        assert runner.run(op, (2,), {"scale": 3}) == 6
        assert len(frames) == (0 if imports else 1)
        assert runner.freed_others is (imports and others)
