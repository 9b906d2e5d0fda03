"""The workload of a plan: cluster, optimizer, precision, micro-batch; and how fast a device computes it.

Roofline of one direction of a call (Williams et al., "Roofline", CACM 2009), matrix products and
other kernels apart because they do not overlap on one stream:

    t = max(matmul_flops / (efficiency * peak), matmul_bytes / bandwidth) + other_bytes / bandwidth

Collectives that the model runs itself come on top (`planner.collectives`): what follows waits for them.

The host launches what the device runs, and is ahead of it while that takes the device longer.  A call's launches take

    t = launches * kernel_s

or what `osdp profile` measured; a segment of a step takes as long as the longer of both (`planner.cost.stage_option`).

Where `osdp profile` measured a call of the same shapes and work, the measured time is used: at another
micro-batch, the roofline's seconds times the ratio of measured to roofline; for a slice, its own roofline's
times the ratio of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from planner.collectives import Operation, collective_s
from planner.cost.stragglers import NO_WAITS, Waits
from planner.cost.unit_memory import outside_bytes
from planner.optimizers import Optimizer, optimizer_of
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import CallTimes, call_key, interpolated
from profiler.errors import OsdpError
from profiler.model_graph import Call, ModelGraph, Parameter, Work

NO_BYTES = Affine()


@dataclass(frozen=True, eq=False)
class Workload:
    """One point of the outer sweep: everything but the plan and the model. Compared by identity."""

    cluster: Cluster
    optimizer_name: str
    """As `planner.optimizers.optimizer_name` gives it."""
    precision: str
    micro_batch: int
    """Samples per rank in one forward."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    waits: Waits = NO_WAITS
    """How long ranks wait for the slowest."""
    outside: tuple[Parameter, ...] = ()
    """Tensors that no unit holds (`ModelGraph.held_whole`)."""
    left: Affine = NO_BYTES
    """Bytes of activations that outlive a micro-batch (`ModelGraph.left_bytes`)."""
    cycles: Affine = NO_BYTES
    """The part of those that the next micro-batch adds to (`ModelGraph.cycle_bytes`)."""
    for_uneven: bool = True
    """Whether strategies that are only for uneven micro-batches may be offered for such."""

    def __post_init__(self) -> None:
        optimizer_of(self.optimizer_name)  # raises for an unknown one
        device = self.cluster.device
        if self.precision not in device.matmul_flops_per_s and not device.rate_name(self.precision):
            what = f"{device.name} has no matmul rate for this precision"
            advice = "another --precision, or another --cluster"
            raise OsdpError(what, got=self.precision, expected=", ".join(device.matmul_flops_per_s), advice=advice)

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        cluster: Cluster,
        optimizer_name: str,
        micro_batch: int,
        accumulation: int = 1,
        waits: Waits = NO_WAITS,
    ) -> Workload:
        """Return the workload of a model that was traced: it gives the precision, and parameters outside units."""
        sizes = micro_batch, accumulation
        outliving = graph.left_bytes, graph.cycle_bytes
        return cls(cluster, optimizer_name, graph.precision, *sizes, waits, graph.held_whole, *outliving)

    @property
    def offers_uneven(self) -> bool:
        """Whether strategies that are only for uneven micro-batches are offered (`StrategySpec.offered`)."""
        return self.for_uneven and self.waits.are_uneven

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer's description."""
        return optimizer_of(self.optimizer_name)

    @cached_property
    def outside_bytes(self) -> int:
        """Memory of parameters that no unit holds, the same under every plan."""
        return outside_bytes(self.outside, self.precision, self.optimizer)

    @cached_property
    def left_bytes(self) -> float:
        """Activations that outlive a step."""
        return self.left(self.micro_batch) + (self.accumulation - 1) * self.cycles(self.micro_batch)

    @cached_property
    def fixed_bytes(self) -> float:
        """What no plan changes: the reserve, parameters that no unit holds, and activations that outlive a step."""
        return self.cluster.reserve_bytes + self.outside_bytes + self.left_bytes

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together train on in one step."""
        return self.cluster.world_size * self.micro_batch * self.accumulation

    @cached_property
    def passes(self) -> tuple[tuple[bool, int], ...]:
        """The micro-batches of a step: (whether it is the last, how many there are)."""
        return ((False, self.accumulation - 1), (True, 1)) if self.accumulation > 1 else ((True, 1),)

    def call_s(self, graph: ModelGraph, call: Call) -> tuple[float, float]:
        """Return the seconds of a call's forward and backward in the mean micro-batch.

        That is the measured time where there is one, else the roofline's, for samples of full length, times
        `Waits.fill`.
        """
        rate = graph.matmul_precision
        forward_s, backward_s = self.compute_s(call.forward, rate), self.compute_s(call.backward, rate)
        key, whole = call.slice_of or (call_key(graph, call) if self._times else "", call)
        if (times := self._times.get(key)) is not None:
            forward_s = self._measured_s(times, times.forward_s, whole.forward, rate, forward_s)
            backward_s = self._measured_s(times, times.backward_s, whole.backward, rate, backward_s)
        return self.waits.fill * forward_s, self.waits.fill * backward_s

    def launch_s(self, graph: ModelGraph, call: Call) -> tuple[float, float]:
        """Return the seconds in which the host launches a call's forward and backward: 0 where nothing is known."""
        launch = self.cluster.launch
        if launch is None:
            return 0.0, 0.0
        key, whole = call.slice_of or (call_key(graph, call) if self._times else "", call)
        times, kernel_s = self._times.get(key), launch.kernel_s.value

        def launch_s(work: Work, of_whole: Work, measured_s: float) -> float:
            if not measured_s:
                return kernel_s * work.launches
            return measured_s if work is of_whole else measured_s * work.launches / max(1, of_whole.launches)

        measured_s = (times.forward_launch_s, times.backward_launch_s) if times else (0.0, 0.0)
        return (
            launch_s(call.forward, whole.forward, measured_s[0]),
            launch_s(call.backward, whole.backward, measured_s[1]),
        )

    def unit_launch_s(self, tensors: int) -> float:
        """Return the host's seconds of one gather or reduction of an FSDP2 unit of so many parameter tensors."""
        launch = self.cluster.launch
        return launch.unit_s.value + tensors * launch.unit_tensor_s.value if launch else 0.0

    def _measured_s(self, times: CallTimes, seconds: Sequence[float], work: Work, rate: str, here_s: float) -> float:
        rooflines = [replace(self, micro_batch=size).compute_s(work, rate) for size in times.micro_batches]
        if not all(rooflines):
            return interpolated(times.micro_batches, seconds, self.micro_batch)
        ratios = [found / roofline for found, roofline in zip(seconds, rooflines, strict=True)]
        return here_s * interpolated(times.micro_batches, ratios, self.micro_batch)

    @cached_property
    def _times(self) -> dict[str, CallTimes]:
        measured = self.cluster.measured
        return {times.key: times for times in measured.calls} if measured else {}

    def compute_s(self, work: Work, precision: str = "") -> float:
        """Return the seconds that one direction of a call computes, by the roofline of matrix products in `precision`.

        Without it, or on a device that has no rate for it, the rate is the one for the precision that was asked for.
        """
        device, batch = self.cluster.device, self.micro_batch
        rates = device.matmul_flops_per_s
        known = precision if precision in rates else device.rate_name(precision) or device.rate_name(self.precision)
        rate = rates[known].value * device.efficiency(known).value
        bandwidth = device.memory_bytes_per_s.value
        matmul_s = max(work.matmul_flops(batch) / rate, work.matmul_bytes(batch) / bandwidth)
        return matmul_s + work.other_bytes(batch) / bandwidth + self.own_collectives_s(work)

    def own_collectives_s(self, work: Work) -> float:
        """Return the seconds of the collectives that the model itself runs in one direction of a call."""
        seconds = 0.0
        for one in work.collectives:
            operation, size_bytes = cast(Operation, one.operation), one.size_bytes(self.micro_batch) / one.count
            seconds += one.count * collective_s(operation, size_bytes, self.cluster, *one.group)
        return seconds

    def optimizer_s(self, parameter_bytes: float, offloaded_bytes: float = 0.0, tensors: int = 0) -> float:
        """Return the seconds of one optimizer step over fp32 shards of so many bytes on the device and on the host.

        `tensors` is how many those on the device are, empty ones that another rank owns too: each takes its time of the
        host and, where steps were measured, of the device.

        The device steps for as long as it computes, or as the host launches that, whichever is longer.  The host steps
        after the device; without figures of it, it takes no time.
        """
        host = self.cluster.host
        host_s = self.optimizer.touched * offloaded_bytes / host.memory_bytes_per_s.value if host else 0.0
        device_s = self._device_steps_s(parameter_bytes, tensors)
        return device_s + self.optimizer_wait_s(parameter_bytes, tensors) + host_s

    def optimizer_wait_s(self, parameter_bytes: float, tensors: int) -> float:
        """Return the part of a step of so many tensors in which the device waits for a host that is not ahead of it."""
        launch = self.cluster.launch
        if launch is None or launch.stepped_tensor_s is None:
            return 0.0
        return max(0.0, tensors * launch.stepped_tensor_s.value - self._device_steps_s(parameter_bytes, tensors))

    def _device_steps_s(self, parameter_bytes: float, tensors: int) -> float:
        measured = self.cluster.measured
        for times in measured.optimizers if measured else ():
            if times.name == self.optimizer_name:
                return times.step_s(tensors, parameter_bytes)
        return self.optimizer.touched * parameter_bytes / self.cluster.device.memory_bytes_per_s.value
