"""Traces of training steps, on every rank: live memory over a step, and what runs when.

    tracer = Tracer("traces", model, optimizer)
    for batch in data:
        with tracer.step():
            ...                     # forward, backward, optimizer

The third step's live tensors go to `memory-rank0.png`, in the same categories as a prediction's; the fourth step's
operators, kernels and collectives to `trace-rank0.json`, which https://ui.perfetto.dev and chrome://tracing open.
They are two steps, because counting tensors slows a step down and would be seen in its trace.
"""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile

from osdp.api import OSDP
from osdp.plots import Moment, check_drawing, draw_memory
from osdp.resources import make_folder
from runtime.failures.gloo_threads import let_gloo_end
from runtime.observe.live_bytes import ACTIVATIONS, LiveBytes

MEMORY_STEP, TRACE_STEP = 3, 4
"""Steps that are traced; in the first ones memory is allocated and kernels are chosen."""


class Tracer:
    """Traces two steps of a loop and writes the traces."""

    def __init__(self, folder: str | Path | None, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the folder; None: nothing is traced. Raises OsdpError if nothing can be written or drawn."""
        self.model, self.optimizer = model, optimizer
        self.folder = None if folder is None else ready_folder(folder)
        self.steps = 0

    @property
    def slows(self) -> bool:
        """Whether the step that runs takes longer because it is traced."""
        return self.folder is not None and self.steps in (MEMORY_STEP, TRACE_STEP)

    def step(self) -> AbstractContextManager[None]:
        """Trace the step that runs inside, if it is its turn."""
        self.steps += 1
        if self.folder is not None and self.steps == MEMORY_STEP:
            return self._memory(self.folder / f"memory-rank{_rank()}.png")
        if self.folder is not None and self.steps == TRACE_STEP:
            return traced(self.folder / f"trace-rank{_rank()}.json")
        return nullcontext()

    @contextmanager
    def _memory(self, path: Path) -> Iterator[None]:
        with recorded(self.model, self.optimizer) as moments:
            yield
        predicted_bytes = self.model.plan.predicted.tensors_bytes if isinstance(self.model, OSDP) else None
        draw_memory(path, moments, f"rank {_rank()}, step {self.steps}", predicted_bytes)


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Write the operators, kernels and collectives of this rank meanwhile as a Chrome trace."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs when it starts and stops, on every rank
    # Of the CPU, and of a GPU if there is one.  Without `acc_events` torch 2.11 warns of other cycles.
    with profile(acc_events=True) as profiled:
        yield
        let_gloo_end()
    whole = path.with_suffix(f".{os.getpid()}.tmp.json")
    profiled.export_chrome_trace(str(whole))
    whole.replace(path)


def ready_folder(folder: str | Path) -> Path:
    """Return a folder that is there and can be written into. Raises OsdpError, also if no picture can be drawn."""
    check_drawing("the picture of a step's memory")
    return make_folder(Path(folder))


@contextmanager
def recorded(model: nn.Module, optimizer: Optimizer) -> Iterator[list[Moment]]:
    """Yield a list that is filled with the live bytes of this rank while the step inside runs."""
    live = MemoryTimeline()
    module = model.module if isinstance(model, OSDP) else model
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(*_: object) -> None:
        live.category = "optimizer_temporaries"
        live.label_gradients(parameters)

    def after(*_: object) -> None:
        live.category = ACTIVATIONS
        live.hold_states(optimizer)

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        with live:
            live.watch(module)
            live.hold_states(optimizer)
            live.begin()
            yield live.moments
    finally:
        live.unwatch()
        for handle in handles:
            handle.remove()


class MemoryTimeline(LiveBytes):  # type: ignore[no-untyped-call]
    """The live bytes after every change since `begin`."""

    def __init__(self) -> None:
        super().__init__(ACTIVATIONS)
        self.moments: list[Moment] = []
        self._start_s = 0.0

    def begin(self) -> None:
        """Make what lives now the first moment."""
        self._start_s = time.perf_counter()
        self.moments.clear()
        self.changed()

    def label(self, tensor: Tensor, category: str) -> None:
        """Label a tensor in one moment: in between, it counts nowhere."""
        before = len(self.moments)
        super().label(tensor, category)
        del self.moments[before:-1]

    def changed(self) -> None:
        self.moments.append(Moment(time.perf_counter() - self._start_s, self.categories()))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
