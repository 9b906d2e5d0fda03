"""Dry runs of training steps of a schedule: what one rank of any number holds at most, without computing.

One process stands for one rank.  The process group is PyTorch's fake one, and tensors are fake, so
nothing is computed, sent or allocated; but it is this runtime and FSDP2 that wrap, gather, free and
reduce, and autograd that decides when to free.  `LiveBytes` adds up.

The second step is what counts: in the first, of one micro-batch, the optimizer makes its states.  Categories are those
of `runtime.observe.live_bytes`; what else is made in the optimizer's step is `optimizer_temporaries`.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.collective_ops import NAMESPACES
from profiler.errors import OsdpError
from profiler.fake_devices import modules_converted
from profiler.garbage_collection import without_garbage_collection
from profiler.simulated_ranks import alike_ranks, exchanged, simulated_ranks
from runtime.apply_schedule import apply_schedule
from runtime.fully_shard_compat import few_chunks
from runtime.observe.allocation_trace import AllocationRecorder, AllocationTrace
from runtime.observe.live_bytes import ACTIVATIONS, HOST, LiveBytes, Peak
from runtime.observe.part_peaks import PartPeak, PartPeaks
from runtime.optimizers import as_priced
from runtime.schedule import Schedule
from runtime.step.gradient_accumulation import Accumulation
from runtime.strategies import ring_reduce_scatter
from runtime.torch_compat import forget_meshes, held_tensor


@dataclass(frozen=True)
class Script:
    """A model and how it trains."""

    build: Callable[[], nn.Module]
    feed: Callable[[nn.Module, int], tuple[Sequence[Any], dict[str, Any]]]
    """(module, micro-batch) -> arguments of its forward."""
    find_loss: Callable[[Any], Tensor]
    """Output of the forward -> scalar to start backward from."""
    optimizer: str
    """As plans name it."""
    micro_batch: int
    """Samples in one forward."""
    answering: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Opens a context for the model's code and its backward, such as one that answers what depends on data."""
    building: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Opens a context for the model's constructors."""


@dataclass(frozen=True)
class DryRun:
    """What one training step holds."""

    peak: Peak
    """Phase `forward`, `backward` or `optimizer`."""
    rest_bytes: int
    """Live between steps."""
    trace: AllocationTrace
    """What the two steps allocate and free."""
    parts: tuple[PartPeak, ...] = ()
    """The most that lives while each part of the model runs, in the order of the step, to its end."""


def dry_run(script: Script, schedule: Schedule, rank: int = 0, *, with_data: bool = False) -> DryRun:
    """Return what a rank of the schedule's world holds in a training step.

    Takes no memory for weights, unless `with_data`: then the CPU computes, with zeros for what other ranks would have
    sent.  Small models take a quarter of the time so, and what kernels leave is seen, not assumed.
    There must be no process group yet.  Raises what the model or its
    wrapping raise, and OsdpError for what the runtime refuses.
    """
    # What is in cycles is freed before each step: looking for it costs the more, the more the process has made before.
    with fake_world(schedule.world_size, rank), warnings.catch_warnings(), without_garbage_collection():
        warnings.simplefilter("ignore")
        live = AllocationRecorder()
        short_rings = patch.object(ring_reduce_scatter, "end_after_one_step", True)
        tensors = _zeros_at_first() if with_data else FakeTensorMode(allow_non_fake_inputs=True)
        with tensors, live, few_chunks(), short_rings, modules_converted(_holds_the_same):
            with script.building():
                model = script.build()
            sharded = apply_schedule(model, schedule, torch.device("cpu"))
            offloaded = {p.path for unit in schedule.units for p in unit.parameters if unit.strategy.offload}
            live.watch(model, offloaded)
            live.follow(model, (name for unit in schedule.units for name in (*unit.modules, *unit.operators)))
            for unit in sharded.units:
                live.hold(unit.communication_tensors(), "communication_buffers")
            optimizers = [
                _Optimizer(script.optimizer, [one for one in live.homes if live.homes[one] == home], home)
                for home in sorted(set(live.homes.values()))
            ]
            accumulation = Accumulation(sharded, schedule.accumulation)
            with _host_copies(live) if offloaded else nullcontext():
                for micro_batches in (1, schedule.accumulation):
                    gc.collect()
                    live.reset_peak()
                    live.begin_step()
                    rest_bytes = live.total_bytes
                    if micro_batches == 1:
                        accumulation.sync()
                    for _ in range(micro_batches):
                        with script.answering():
                            _train(accumulation.run, model, script, live)
                    _step(live, optimizers)
            peak, trace, parts = live.peak, live.trace(), tuple(live.parts)
            live.unwatch()
            del optimizers, model, sharded, accumulation
    return DryRun(peak, rest_bytes, trace, parts)


def _holds_the_same(old: Tensor, new: Tensor) -> bool:
    """Return whether a conversion of a parameter has changed nothing, as in a forward that moves its layers here."""
    one, other = held_tensor(old), held_tensor(new)
    return one.dtype == other.dtype and one.untyped_storage()._cdata == other.untyped_storage()._cdata


@contextmanager
def _zeros_at_first() -> Iterator[None]:
    """Let tensors without values have zeros, and compute with zeros in place of denormal numbers.

    What other ranks send would be in them.  As memory is found it could be NaN, which some kernels refuse; and it is
    full of denormal numbers, for which a CPU takes a hundred times as long.
    """
    torch.set_flush_denormal(True)
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_flush_denormal(False)


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func.namespace in NAMESPACES:
            for exchange in exchanged(func, args, out):
                target, source, part = exchange
                if exchange.is_known and target.numel() <= _FEW:
                    target.detach().copy_(part.repeated(source.detach(), target.shape))
        return out.zero_() if func.name() in _WITHOUT_VALUES else out


_WITHOUT_VALUES = frozenset(
    f"aten::{name}" for name in ("empty.memory_format", "empty_like", "empty_strided", "new_empty")
)
"""Names of ops that make tensors without values."""


_FEW = 4096
"""Elements up to which what is received has values, as lengths that ranks tell each other."""


@contextmanager
def _host_copies(live: LiveBytes) -> Iterator[None]:
    """Copy what FSDP2 moves between a GPU and the host: here both are the CPU, where `Tensor.to` copies nothing.

    So shards pass the device as they are gathered, and gradients leave it, in FSDP2's streams; and what it keeps of a
    reduction stays on the device.  Its moves are told from a model's by `non_blocking` and by what they move: a shard
    of the host, or, without history, to the host.  (A torch function mode would be nicer; backward's hooks see none.)
    """
    move = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = move(tensor, *args, **kwargs)
        to_device = live.category_of(tensor) == HOST
        if moved is not tensor or "non_blocking" not in kwargs or (torch.is_grad_enabled() and not to_device):
            return moved
        before = live.category
        live.category = before if to_device else HOST
        copy = moved.clone()
        live.category = before
        return copy

    with patch.object(torch.Tensor, "to", to):
        yield


def _train(run: Callable[..., Any], model: nn.Module, script: Script, live: PartPeaks) -> None:
    """Run one micro-batch forward and, if anything is trained, backward."""
    live.enter("forward")
    args, kwargs = script.feed(model, script.micro_batch)
    output = run(*args, **kwargs)
    if any(parameter.requires_grad for parameter in model.parameters()):
        loss = script.find_loss(output)
        live.enter("backward")
        # The output is held meanwhile, logits and all: as in most loops, and as the tracer counts.
        loss.backward()  # type: ignore[no-untyped-call]


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Be one rank of a process group that sends nothing. Raises OsdpError if there is one already."""
    if dist.is_initialized():
        what = "a dry run makes its own process group, so it needs a process of its own"
        got = "a process group that is initialised"
        raise OsdpError(what, got=got, advice="call it before init_process_group, or in another process")
    with simulated_ranks(world_size, rank), alike_ranks():
        forget_meshes()
        try:
            yield
        finally:
            forget_meshes()


class _Optimizer:
    """An optimizer of local shards: of fake DTensors torch 2.11 makes temporaries of global size."""

    def __init__(self, name: str, parameters: Sequence[Tensor], home: str) -> None:
        self._home = home
        self._shards = {one: nn.Parameter(held_tensor(one).detach(), one.requires_grad) for one in parameters}
        self._optimizer = as_priced(name)(self._shards.values())

    def step(self, live: LiveBytes) -> None:
        """Update the parameters that have gradients."""
        live.category = self._home or "optimizer_temporaries"
        live.label_gradients(self._shards)
        for parameter, shard in self._shards.items():
            # Under odc gradients are still to be completed here, which no size depends on.
            shard.grad = None if parameter.grad is None else held_tensor(parameter.grad)
        self._optimizer.step()
        live.hold_states(self._optimizer, self._home)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None


def _step(live: PartPeaks, optimizers: Sequence[_Optimizer]) -> None:
    """Run the optimizers' steps and drop the gradients."""
    live.enter("optimizer")
    for optimizer in optimizers:
        optimizer.step(live)
    live.enter("zero")
    live.category = ACTIVATIONS
    for optimizer in optimizers:
        optimizer.zero_grad()
