"""Costs of a stage's calls at one micro-batch, what of them is the same at all, and of its units on one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate

from planner.cost.shared_collectives import trained_bytes
from planner.cost.unit_communication import UnitTraffic, unit_traffic
from planner.cost.unit_memory import UnitBytes, unit_bytes
from planner.cost.workload import Workload
from planner.model.stages import StagedModel
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import all_used, as_reduced
from profiler.affine import Affine
from profiler.byte_sizes import allocated_bytes
from profiler.model_graph import UNSEEN_RERUN, Call, CallMemory, Parameter, Recompute

Costs = tuple[UnitBytes, UnitTraffic]
Live = tuple[str, int]
"""Activations that are alive at one moment: its name, and the call within the stage (`StageCosts.activations`)."""
NO_ACTIVATIONS: Live = ("none", 0)


_STEPPED = "optimizer", "updates", "largest", "second"
"""What the optimizer makes of a unit: nothing for parameters without a gradient, whatever is reduced for them."""


class UnitCosts:
    """Bytes and communication time of units on one cluster, cached."""

    def __init__(self, model: StagedModel, load: Workload) -> None:
        self.graph, self.load, self.registered, self.unused = model.graph, load, model.registered, model.unused
        self.known: dict[tuple[tuple[int, ...], Strategy, bool], Costs] = {}
        called = dict.fromkeys(call.operator for call in model.graph.calls)
        self.model_bytes = sum(trained_bytes(model.graph.operators[operator].parameters) for operator in called)

    def __call__(self, operators: tuple[int, ...], strategy: Strategy, elsewhere: bool = False) -> Costs:
        key, load, cluster = (operators, strategy, elsewhere), self.load, self.load.cluster
        if key not in self.known:
            listed = self.registered.get(operators, operators)
            parameters = [p for operator in listed for p in self.graph.operators[operator].parameters]
            ranks = cluster.gpus_per_node, cluster.world_size
            held = unit_bytes(parameters, strategy, load.precision, load.optimizer, elsewhere, *ranks)
            if self.unused and not self.unused.isdisjoint(operators):
                held, parameters = self._with_unused(held, parameters, strategy, elsewhere)
            if other := self.known.get((operators, strategy, not elsewhere)):
                traffic = other[1]  # whoever owns it
            else:
                trains, model_bytes = self.graph.trains, self.model_bytes
                where = parameters, strategy, load.precision, cluster
                traffic = unit_traffic(*where, trains=trains, model_bytes=model_bytes)
            self.known[key] = held, traffic
        return self.known[key]

    def _with_unused(
        self, own: UnitBytes, parameters: list[Parameter], strategy: Strategy, elsewhere: bool
    ) -> tuple[UnitBytes, list[Parameter]]:
        """Return what a unit holds and reduces, given that without what it makes for parameters without a gradient."""
        load, cluster = self.load, self.load.cluster
        ranks = cluster.gpus_per_node, cluster.world_size
        whole = all_used(parameters)
        held = unit_bytes(whole, strategy, load.precision, load.optimizer, elsewhere, *ranks)
        if as_reduced(parameters, strategy, cluster.world_size, accumulates=load.accumulation > 1) == whole:
            return replace(held, **{name: getattr(own, name) for name in _STEPPED}), [*whole]
        return replace(own, window=held.window), parameters


class MeanUnitCosts(UnitCosts):
    """Costs of units averaged over ranks, rounded down; `known` are those of each rank."""

    def __call__(self, operators: tuple[int, ...], strategy: Strategy, elsewhere: bool = False) -> Costs:
        mine, traffic = super().__call__(operators, strategy, elsewhere)
        if not strategy.spec.has_owner or elsewhere:
            return mine, traffic
        other, _ = super().__call__(operators, strategy, elsewhere=True)
        ranks = strategy.group
        mean = [(getattr(mine, f.name) + (ranks - 1) * getattr(other, f.name)) // ranks for f in fields(UnitBytes)]
        return UnitBytes(*mean), traffic


def _is_added_up(call: Call) -> bool:
    """Return whether the gradient of a call's input is added to others after its backward, in any way of running."""
    memory = call.memories(is_whole=False)
    found = (one for one in (memory, memory.recomputed, memory.selective) if one is not None)
    return any(one.module_backward_end_bytes != one.backward_end_bytes for one in found)


class StageFrame:
    """A stage in a workload, as it is at every micro-batch."""

    def __init__(self, model: StagedModel, index: int, load: Workload) -> None:
        """`load` is any of the workloads that differ in the micro-batch alone."""
        stage, graph = model.stages[index], model.graph
        self.model, self.index, self.stage, self.load = model, index, stage, load
        self.is_bottom = index == 0
        self.is_top = index == len(model.stages) - 1
        called = dict.fromkeys(call.operator for call in stage.calls)
        trained = {o: [p for p in graph.operators[o].parameters if p.trainable and p.used] for o in called}
        self.has_opening = stage.block is not None and _opens(stage.calls[0])
        """Whether the block allocates anything before its first call."""
        self.sums = {j for j, call in enumerate(stage.calls) if _is_added_up(call)}
        """Calls after whose backward the gradient of their input is added to others."""
        self.full_gradients = {
            operator: sum(allocated_bytes(p.compute_bytes(load.precision) * p.numel) for p in parameters)
            for operator, parameters in trained.items()
        }


def _opens(call: Call) -> bool:
    """Return whether anything is allocated before a call that is the first of a block."""
    seen = [one.memory(how) or one for one in (call, call.apart) if one for how in Recompute]
    peaks = [(one.opening_forward_peak_bytes, one.opening_backward_peak_bytes) for one in seen]
    return any(one != (Affine(), Affine()) for one in peaks)


class StageCosts:
    """Costs of a stage's calls at one micro-batch, shared by all its options."""

    def __init__(self, frame: StageFrame, load: Workload) -> None:
        graph = frame.model.graph
        self.frame, self.stage, self.load = frame, frame.stage, load
        seconds = [load.call_s(graph, call) for call in self.stage.calls]
        self.forward_s, self.backward_s = map(list, zip(*seconds, strict=True))
        launches_s = [load.launch_s(graph, call) for call in self.stage.calls]
        self.forward_launch_s, self.backward_launch_s = map(list, zip(*launches_s, strict=True))
        self.memory = cache(lambda recompute: StageActivations(frame, load.micro_batch, recompute))
        self.again_s = cache(self._again_s)
        self.of_calls = cache(self._of_calls)
        self.launch_again_s = cache(self._launch_again_s)

    def _of_calls(self, calls: tuple[int, ...]) -> tuple[float, float, float, float]:
        """Return the seconds of the forward and backward of some calls, and those in which the host launches them."""
        found = (self.forward_s, self.backward_s, self.forward_launch_s, self.backward_launch_s)
        forward_s, backward_s, forward_launch_s, backward_launch_s = (sum(one[j] for j in calls) for one in found)
        return forward_s, backward_s, forward_launch_s, backward_launch_s

    def _launch_again_s(self, recompute: Recompute) -> tuple[float, float]:
        """Return the seconds that recomputing the block costs the host in forward and in backward.

        Its forward is launched again.  Selectively, every operation of both forwards passes through a dispatch mode in
        Python, which doubles what it takes (`runtime.strategies.activation_checkpointing`; 48 blocks of GPT-2 on an
        H200 took the host 114 ms more recomputed whole, and 137 ms selectively).
        """
        once_s = float(sum(self.forward_launch_s)) if self.stage.block is not None else 0.0
        match recompute:
            case Recompute.NOTHING:
                return 0.0, 0.0
            case Recompute.SELECTIVE:
                return once_s, 2.0 * once_s
            case Recompute.EVERYTHING | Recompute.OFFLOADED:
                return 0.0, once_s

    def _again_s(self, recompute: Recompute, is_whole: bool) -> float:
        """Return the seconds that the block's forward takes when it runs again: its part of the forward by roofline.

        A block that is one unit ends with the last of what backward needs, others run to their end
        (`runtime.strategies.activation_checkpointing`).
        """
        block, forward_s = self.stage.block, float(sum(self.forward_s))
        if not recompute or block is None:
            return 0.0
        graph = self.frame.model.graph
        rerun = graph.blocks[block].runs_again(recompute, is_whole=is_whole)
        forward = [call.forward for call in self.stage.calls]
        if rerun is UNSEEN_RERUN or (recompute >= Recompute.EVERYTHING and not is_whole):
            return forward_s
        work = rerun.work
        if not is_whole:
            work = replace(work, other_bytes=sum((one.other_bytes for one in forward), Affine()))
        whole_s = sum(self.load.compute_s(one, graph.matmul_precision) for one in forward)
        share = self.load.compute_s(work, graph.matmul_precision) / whole_s if whole_s else 0.0
        again_s: float = min(1.0, share) * forward_s
        return again_s

    def copy_waits_s(self, recompute: Recompute, is_whole: bool) -> tuple[float, float]:
        """Return the seconds that the block's forward and backward wait for what is copied to the host and back.

        Its input leaves while its forward runs, and that of the block below comes back while its backward does, which
        is priced as if it were its own.  Where the block above has no room for it, it comes back when it is needed.
        """
        if recompute is not Recompute.OFFLOADED or self.load.cluster.host is None:
            return 0.0, 0.0
        copy_s = self.memory(recompute).offloaded / self.load.cluster.host.link_bytes_per_s.value
        if not self.load.cluster.leaves_host_link:
            return copy_s, copy_s
        backward_s = (
            float(sum(self.backward_s)) + self.again_s(recompute, is_whole) if self._comes_back_early() else 0.0
        )
        return max(0.0, copy_s - float(sum(self.forward_s))), max(0.0, copy_s - backward_s)

    def _comes_back_early(self) -> bool:
        """Whether the block's input can come back while another runs back: the block above has room for it."""
        index, stages = self.frame.index, self.frame.model.stages
        above = stages[index + 1] if index + 1 < len(stages) else None
        if above is None or above.block is None or self.stage.block is None or not above.can_offload:
            return False
        blocks, batch = self.frame.model.graph.blocks, self.load.micro_batch
        return blocks[above.block].offloadable_bytes(batch) >= blocks[self.stage.block].offloadable_bytes(batch)

    def saved_bytes(self, recompute: Recompute) -> float:
        """Return the bytes of activations that the stage keeps from forward to backward."""
        return self.memory(recompute).kept + self.memory(recompute).shared

    def activations(self, recompute: Recompute, is_whole: bool) -> Mapping[Live, float]:
        """Return the bytes of activations that are alive at the moments of `planner.cost.stage_memory`.

        `is_whole` is for a block that is one unit.
        """
        return self.memory(recompute).at(is_whole)


class StageActivations:
    """Activations of a stage's calls at one micro-batch, kept, recomputed or offloaded.

    `saved` are those that calls before each keep, `held` those of them that the model's forward holds itself, so that
    they are not counted again before it is over; `shared` is what the stage keeps beside them if any other is
    recomputed.  `kept` is what is left of them when the forward is over: without what is `offloaded`.  While the block
    runs back, there is room for as much as that, as the input of the block below, if that is offloaded too, comes back.
    The peaks of calls, and of the block that runs again, are those of a stage that is not one unit.
    """

    def __init__(self, frame: StageFrame, micro_batch: int, recompute: Recompute) -> None:
        self.frame, self.batch, self.recompute = frame, micro_batch, recompute
        calls, block = frame.stage.calls, frame.stage.block
        self.calls = self._calls(is_whole=False)
        self.saved = [*accumulate((call.saved_bytes(micro_batch) for call in self.calls), initial=0.0)]
        self.forward_peak, self.backward_peak, self.again_peak = list[float](), list[float](), list[float]()
        self.held = [*accumulate((call.held_bytes(micro_batch) for call in self.calls), initial=0.0)]
        is_offloaded = recompute is Recompute.OFFLOADED and block is not None
        self.offloaded = frame.model.graph.blocks[block or 0].offloadable_bytes(micro_batch) if is_offloaded else 0.0
        self.kept = self.saved[-1] - self.offloaded
        for saved, held, call in zip(self.saved, self.held, self.calls, strict=False):
            self.forward_peak.append(saved - held + call.forward_peak(micro_batch))
            self.backward_peak.append(saved + call.backward_peak(micro_batch) + self.offloaded)
        if frame.has_opening:
            first, own = self.calls[0], frame.full_gradients[calls[0].operator] if calls[0].reads_parameters else 0
            opening = first.opening_backward_peak_bytes(micro_batch) + own + self.offloaded
            self.forward_peak[0] = max(self.forward_peak[0], first.opening_forward_peak_bytes(micro_batch))
            self.backward_peak[0] = max(self.backward_peak[0], opening)
        self.shared = 0.0 if recompute else sum(call.shared_bytes(micro_batch) for call in calls)
        if recompute and block is not None:
            rerun = frame.model.graph.blocks[block].runs_again(recompute, is_whole=False)
            self.again_peak = [rerun.peak_bytes(micro_batch) + self.offloaded] * len(calls)
        self.at = cache(self._at)

    def _calls(self, *, is_whole: bool) -> list[CallMemory]:
        """Return the calls, given whether the stage is a block of one unit."""
        memories = [call.memories(is_whole=is_whole) for call in self.frame.stage.calls]
        return [one.memory(self.recompute) or one for one in memories]

    def _at(self, is_whole: bool) -> Mapping[Live, float]:
        batch, found, block = self.batch, {NO_ACTIVATIONS: 0.0}, self.frame.stage.block
        calls, again_start, again_peak, opening = self._calls(is_whole=is_whole), 0.0, 0.0, 0.0
        if self.recompute and block is not None:
            run = self.frame.model.graph.blocks[block]
            rerun, opening = run.runs_again(self.recompute, is_whole=is_whole), run.opening_bytes(batch)
            again_start, again_peak = rerun.start_bytes(batch), rerun.peak_bytes(batch) + self.offloaded
        # As a block of several units runs again, each is gathered; nothing of it has been freed then.
        runs_on = bool(self.recompute) and not is_whole
        kept = StageActivations(self.frame, batch, Recompute.NOTHING) if runs_on else None
        # What it has kept and saves, it takes up again as it goes; that is a part of `kept` from then on.
        selective = self.recompute is Recompute.SELECTIVE
        taken = [call.retaken_bytes(batch) if selective else 0.0 for call in self.frame.stage.calls]
        taken = [*accumulate(taken, initial=0.0)]
        # Parts of a call before its unit ends: with the block, or with its last module.  What runs again has been
        # gathered for the rest of its block too.
        ends = 2 if is_whole else 1
        ends_back = 2 if self.recompute else ends
        for j, (saved, call) in enumerate(zip(self.saved, calls, strict=False)):
            forward, backward = call.forward_parts(batch), call.backward_parts(batch)
            before = saved - self.held[j]
            start = call.rest_backward_start_bytes if is_whole else call.module_backward_start_bytes
            # The gradients of a module's inputs are there; those of a block's are added up in it.
            end = call.backward_end_bytes(batch)
            reduced = end if is_whole else call.module_backward_end_bytes(batch)
            at: dict[str, float] = {
                "gather": before + call.forward_start_bytes(batch),
                "call": before + max(forward),
                "module": before + max(forward[:ends]),
                "tail": before + max(forward[ends:]),
                "backward of tail": saved + max(backward[ends_back:]),
                "unshard": saved + start(batch) + self.offloaded,
                "backward of call": saved + max(backward) + self.offloaded,
                "backward of module": saved + max(backward[:ends_back]) + self.offloaded,
                "reduction": saved + reduced + self.offloaded,
                # A sum is made beside what it is of: as much as is gone when it has taken the place of both.
                "sum": saved + 2 * reduced - end + self.offloaded,
                "end": saved + end + self.offloaded,
            }
            if is_whole and self.frame.stage.spanning:
                at["unshard inside"] = saved + call.module_backward_start_bytes(batch) + self.offloaded
            for number, own in enumerate(self.frame.stage.calls[j].reruns):
                at[f"own rerun {number}"] = saved + own.peak_bytes(batch)
            if self.frame.has_opening and not j:
                at["opening"] = call.opening_forward_peak_bytes(batch)
                at["backward of opening"] = call.opening_backward_peak_bytes(batch) + self.offloaded
                if is_whole:  # It is reduced when all of that is over.
                    at["reduction"] = max(at["reduction"], call.opening_backward_end_bytes(batch) + self.offloaded)
            if self.recompute:
                at |= {"before again": again_start, "call again": again_peak}
                if is_whole:  # It is gathered first, and then runs again.
                    at["unshard"] = again_start
            if kept is not None:
                begins = kept.calls[0].forward_start_bytes(batch) - opening
                grown = kept.saved[j] - taken[j] - begins + again_start + self.offloaded
                at["gather again"] = grown + kept.calls[j].forward_start_bytes(batch)
                inside = 2 if j == len(calls) - 1 else 3  # what follows the block does not run again
                at["call again"] = grown + max(kept.calls[j].forward_parts(batch)[:inside])
                at["opening again"] = grown + kept.calls[j].opening_forward_peak_bytes(batch)
            found |= {(name, j): bytes_alive for name, bytes_alive in at.items()}
        return found
