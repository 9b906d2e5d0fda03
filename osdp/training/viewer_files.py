"""Real steps of rank 0 for the viewers that show a plan's predicted ones, in files beside those.

`osdp plan --timeline step.json` writes the predicted trace, and `osdp train --timeline step.json` that of a real step
to `step.measured.json`; and likewise `--memory-snapshot step.pickle`, with what PyTorch's allocator does in a step.
They are two steps, since each slows its own down, and none of those of `osdp.training.trace_step`.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from osdp.planning.viewer_paths import measured_path
from osdp.training.trace_step import TRACE_STEP, traced

SNAPSHOT_STEP, TIMELINE_STEP = TRACE_STEP + 1, TRACE_STEP + 2
"""Steps of a run that are recorded."""
MOST_ENTRIES = 1_000_000
"""Allocations and frees that a snapshot has at most; later ones push out the first."""


class StepRecorder:
    """Records two steps of a run on rank 0 and writes a file for each."""

    def __init__(self, memory_snapshot: str | None, timeline: str | None, device: torch.device, rank: int) -> None:
        """None: that one is not recorded.  A snapshot is of CUDA's allocator: on a CPU, rank 0 warns."""
        if memory_snapshot is not None and device.type != "cuda":
            if rank == 0:
                what = "there is no CUDA allocator to record on a CPU: no memory snapshot is written"
                warnings.warn(what, stacklevel=2)
            memory_snapshot = None
        self._paths = {SNAPSHOT_STEP: memory_snapshot, TIMELINE_STEP: timeline}
        self._is_writer, self._steps = rank == 0, 0

    @property
    def slows(self) -> bool:
        """Whether the step that runs takes longer because it is recorded; so on all ranks, as they wait for rank 0."""
        return self._paths.get(self._steps) is not None

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0: none is."""
        return max((step for step, path in self._paths.items() if path is not None), default=0)

    def step(self) -> AbstractContextManager[None]:
        """Record the step that runs inside, if it is its turn."""
        self._steps += 1
        path = self._paths.get(self._steps)
        if path is None or not self._is_writer:
            return nullcontext()
        return (allocations if self._steps == SNAPSHOT_STEP else traced)(measured_path(path))


@contextmanager
def allocations(path: Path) -> Iterator[None]:
    """Record what CUDA's allocator does meanwhile, and write the snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)
    try:
        yield
        torch.cuda.synchronize()
        whole = path.with_suffix(f".{os.getpid()}.tmp")
        torch.cuda.memory._dump_snapshot(str(whole))  # type: ignore[no-untyped-call]
        whole.replace(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
