"""What a unit of FSDP2 costs beyond its collectives and its computation: hook overhead and straggler wait.

A stack of L units with hardly any parameters computes matrix products, plain and under `fully_shard`, in turn.
Each unit is gathered twice and reduced once in a step, so with t the seconds of a step, and g and s those of a gather
and of a reduction at that size,

    overhead = (t_sharded - t_plain - exposed) / (3 L)
    exposed  = L (2 g + s)        where collectives are waited for at once
               g + s              on streams, where but the first gather and the last reduction run under the products

t_sharded is the slowest rank's, as all end together; t_plain the mean of all ranks, as the times of calls are.  Where
there are windows the same stack also pulls and pushes (`odc`), where no rank waits for stragglers: then t_sharded is
the mean of all ranks too, and the collectives are pulls and pushes.  Steps are timed from end to end, by the host's
clock: what the host takes is looked for.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import MLP, Block
from profiler.alias_outputs import return_no_views, wrappable
from profiler.cluster.cluster import Launch
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CollectiveTimes
from profiler.handed_containers import ContainersHanded
from profiler.mixed_precision import COMPUTE_DTYPE, cast_inputs
from profiler.timing.device_rates import elapsed_s
from profiler.timing.host_launches import mean_s
from profiler.timing.overlap import meet
from runtime.failures.rank_agreement import Agreement
from runtime.meshes import Meshes
from runtime.odc.one_sided_unit import OneSidedUnit
from runtime.odc.step_protocol import Exchange, Sharing
from runtime.optimizers import OPTIMIZERS
from runtime.strategies.fully_sharded import support_repeated_calls

UNITS = 8
ROWS = {"cpu": 256, "cuda": 2048}
"""Of the matrices, by device type."""
PRODUCTS = 4
"""Of a unit's forward, and of its backward."""
TENSORS = 12
"""Parameter tensors of a unit, as many as a layer of GPT-2 has: FSDP2 handles each."""
ELEMENTS = 128
"""Of each."""
NARROW = GPT2Config(vocabulary_size=1, maximum_positions=1, hidden_size=64, layers=1, heads=4)
"""Of layers that take a GPU less time than the host needs to launch them."""
FEW_TENSORS = 4
"""Of such a layer's feed-forward network."""
POSITIONS = 16
WARM_UP_ROUNDS = 2
EVENTS = 3
"""Gathers and reductions of a unit in a step."""


class _Unit(nn.Module):
    """Multiplies by a fixed matrix, several times."""

    matrix: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(ELEMENTS) for _ in range(TENSORS))
        self.register_buffer("matrix", torch.randn(rows, rows) / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * sum(weight[0] for weight in self.weights) / len(self.weights)
        for _ in range(PRODUCTS):
            x = x @ self.matrix
        return x


@dataclass(frozen=True)
class UnitTimes:
    """What units of FSDP2 cost."""

    overhead_s: float
    """Of each gather and each reduction; at least 0."""
    one_sided_overhead_s: float | None = None
    """Of each pull and each push, likewise; None where these were not measured."""


def measure_units(
    times: Sequence[CollectiveTimes], nodes: int, ranks_per_node: int, repetitions: int, device: torch.device
) -> UnitTimes:
    """Return the overheads. A collective call."""
    rows, meshes, world_size = ROWS[device.type], Meshes(device.type, nodes, ranks_per_node), nodes * ranks_per_node
    native = (one for one in times if (one.stride, one.algorithm) == (1, "native"))
    collective_s = {(one.operation, one.ranks): one.time_s(4 * TENSORS * ELEMENTS) for one in native}
    unit = partial(_Unit, rows)
    stacks = [_Stack(unit, device), _Stack(unit, device, meshes.mesh(world_size))]
    if ("pull", ranks_per_node) in collective_s:
        stacks.append(_Stack(unit, device, meshes.group_mesh(ranks_per_node), windows=meshes))
    x = torch.randn(rows, rows, device=device, requires_grad=True)

    def round_s() -> list[float]:
        seconds = []
        for stack in stacks:
            meet(device)
            seconds.append(elapsed_s(partial(stack.run, x), device))
            stack.finish()
        return seconds

    mine = _rounds(round_s, repetitions)
    everyone = Agreement.all().gather("measure units", lambda: mine)
    rounds = list(zip(*everyone, strict=True))

    def taken_s(stack: int, over_ranks: Callable[[Iterable[float]], float]) -> float:
        return median(over_ranks(one[stack] for one in of_ranks) for of_ranks in rounds)

    def overhead_s(sharded_s: float, gather_s: float, reduce_s: float) -> float:
        exposed_s = exposed_communication_s(gather_s, reduce_s, on_streams=device.type == "cuda")
        return max(0.0, sharded_s - taken_s(0, fmean) - exposed_s) / (EVENTS * UNITS)

    own = collective_s["all_gather", world_size], collective_s["reduce_scatter", world_size]
    if len(stacks) < 3:
        return UnitTimes(overhead_s(taken_s(1, max), *own))
    one_sided = collective_s["pull", ranks_per_node], collective_s["push", ranks_per_node]
    return UnitTimes(overhead_s(taken_s(1, max), *own), overhead_s(taken_s(2, fmean), *one_sided))


@dataclass(frozen=True)
class UnitLaunch:
    """What units of FSDP2 take of the host; at least 0."""

    unit_s: float
    """Of each gather and each reduction, its hooks included."""
    tensor_s: float
    """More for each parameter tensor."""
    stepped_tensor_s: float
    """For each that a fused optimizer steps, and whose gradient it forgets."""


def measure_unit_launch(
    nodes: int, ranks_per_node: int, repetitions: int, device: torch.device, precision: str
) -> UnitLaunch:
    """Return what units take of the host of a GPU in a precision, as the ranks' mean. A collective call."""
    stacks = LaunchedStacks(Meshes(device.type, nodes, ranks_per_node).mesh(nodes * ranks_per_node), device, precision)
    mine = [mean_s(of_stack) for of_stack in zip(*stacks.rounds(repetitions), strict=True)]
    everyone = Agreement.all().gather("measure the host", lambda: mine)
    return unit_launch(*(fmean(of_ranks) for of_ranks in zip(*everyone, strict=True)))


class LaunchedStacks:
    """Stacks of units with hardly anything to compute, by which the host is timed.

    Units are layers of GPT-2, or their feed-forward networks, which have fewer tensors; each plain, and sharded, and
    both as a plan runs them: cast for the precision, without views, and with what the runtime adds to FSDP2.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, precision: str) -> None:
        units: tuple[Callable[[], nn.Module], ...] = (lambda: MLP(NARROW, 0.02), lambda: Block(NARROW))
        self._stacks = [_Stack(unit, device, one, precision=precision) for unit in units for one in (None, mesh)]
        self._optimizer = OPTIMIZERS["fused_adam"](self._stacks[-1].module.parameters())
        self._x = torch.randn(1, POSITIONS, NARROW.hidden_size, device=device, requires_grad=True)
        self._device = device

    def rounds(self, repetitions: int) -> list[list[float]]:
        """Return the seconds of so many rounds. A collective call."""
        return _rounds(self.round_s, repetitions)

    def round_s(self) -> list[float]:
        """Return the seconds until a step of each stack, and an optimizer's of the last, is launched.

        A collective call.  The first few take longer.
        """
        seconds = [self._launched_s(partial(stack.run, self._x)) for stack in self._stacks]
        seconds.append(self._launched_s(self._step))
        for stack in self._stacks:
            stack.finish()
        return seconds

    def _launched_s(self, work: Callable[[], None]) -> float:
        meet(self._device)
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def unit_launch(
    few_plain_s: float, few_sharded_s: float, plain_s: float, sharded_s: float, stepped_s: float
) -> UnitLaunch:
    """Return what the host's seconds of four stacks and an optimizer's step say."""
    few_s, many_s = (max(0.0, one) / (EVENTS * UNITS) for one in (few_sharded_s - few_plain_s, sharded_s - plain_s))
    tensor_s = max(0.0, many_s - few_s) / (TENSORS - FEW_TENSORS)
    return UnitLaunch(max(0.0, many_s - TENSORS * tensor_s), tensor_s, stepped_s / (TENSORS * UNITS))


def mean_launch(found: Sequence[UnitLaunch]) -> UnitLaunch:
    """Return the mean of what was measured at several times."""
    names = ("unit_s", "tensor_s", "stepped_tensor_s")
    return UnitLaunch(*(fmean(getattr(one, name) for one in found) for name in names))


def launch_of(kernel_s: Figure, unit: UnitLaunch, how: str) -> Launch:
    """Return what launching takes, as a cluster has it; `how` is where what units take is from."""
    return Launch(kernel_s, *(Figure(value, how) for value in (unit.unit_s, unit.tensor_s, unit.stepped_tensor_s)))


def exposed_communication_s(gather_s: float, reduce_s: float, *, on_streams: bool) -> float:
    """Return the seconds of a step's collectives that nothing runs beside."""
    return gather_s + reduce_s if on_streams else UNITS * (2 * gather_s + reduce_s)


def _rounds(round_s: Callable[[], list[float]], repetitions: int) -> list[list[float]]:
    """Return the seconds of so many rounds after those that warm up. A collective call."""
    return [round_s() for _ in range(WARM_UP_ROUNDS + repetitions)][WARM_UP_ROUNDS:]


class _Stack:
    """Units one after the other: plain, sharded over a mesh, or pulled and pushed over one inside nodes."""

    def __init__(
        self,
        unit: Callable[[], nn.Module],
        device: torch.device,
        mesh: DeviceMesh | None = None,
        *,
        windows: Meshes | None = None,
        precision: str = "fp32",
    ) -> None:
        self.module = nn.Sequential(*(unit() for _ in range(UNITS))).to(device)
        self.exchange: Exchange | None = None
        dtype = COMPUTE_DTYPE[precision]
        containers = ContainersHanded(wrappable(self.module))
        return_no_views(wrappable(self.module))
        if mesh is None and dtype is not None:
            self.module.to(dtype)
        if mesh is not None:
            policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
            for module in self.module:
                support_repeated_calls(fully_shard(module, mesh=mesh, mp_policy=policy), [module])
            fully_shard(self.module, mesh=mesh, mp_policy=policy)
        cast_inputs(self.module, precision)
        containers.surround()
        if mesh is not None and windows is not None:
            units = [OneSidedUnit(str(n), cast(FSDPModule, unit), None) for n, unit in enumerate(self.module)]
            self.exchange = Exchange({Sharing(mesh.size()): units}, windows, 1)

    def run(self, x: Tensor) -> None:
        self.module(x).sum().backward()

    def finish(self) -> None:
        if self.exchange is not None:
            self.exchange.reset()
        self.module.zero_grad()
