"""Costs of a stage's calls at one micro-batch, what of them is the same at all, and of its units on one cluster."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

from planner.cost.unit_communication import UnitTraffic, unit_traffic
from planner.cost.unit_memory import UnitBytes, unit_bytes
from planner.cost.workload import Workload
from planner.model.stages import StagedModel
from planner.strategies.spec import Strategy

Costs = tuple[UnitBytes, UnitTraffic]
Live = tuple[str, int]
"""Activations that are alive at one moment: its name, and the call within the stage (`StageCosts.activations`)."""
NO_ACTIVATIONS: Live = ("none", 0)


class UnitCosts:
    """Bytes and communication time of units on one cluster, cached."""

    def __init__(self, model: StagedModel, load: Workload) -> None:
        self.graph, self.load = model.graph, load
        self.known: dict[tuple[tuple[int, ...], Strategy, bool], Costs] = {}

    def __call__(self, operators: tuple[int, ...], strategy: Strategy, elsewhere: bool = False) -> Costs:
        key, load, cluster = (operators, strategy, elsewhere), self.load, self.load.cluster
        if key not in self.known:
            parameters = [p for operator in operators for p in self.graph.operators[operator].parameters]
            ranks = cluster.gpus_per_node, cluster.world_size
            held = unit_bytes(parameters, strategy, load.precision, load.optimizer, elsewhere, *ranks)
            traffic = unit_traffic(parameters, strategy, load.precision, cluster, trains=self.graph.trains)
            self.known[key] = held, traffic
        return self.known[key]


class StageFrame:
    """A stage in a workload, as it is at every micro-batch."""

    def __init__(self, model: StagedModel, index: int, load: Workload) -> None:
        """`load` is any of the workloads that differ in the micro-batch alone."""
        stage, graph = model.stages[index], model.graph
        self.model, self.stage, self.load = model, stage, load
        self.is_bottom = index == 0
        self.is_top = index == len(model.stages) - 1
        trained = {c.operator: [p for p in graph.operators[c.operator].parameters if p.trainable] for c in stage.calls}
        self.full_gradients = {
            operator: sum(p.compute_bytes(load.precision) * p.numel for p in parameters)
            for operator, parameters in trained.items()
        }
        start, count = stage.start, len(stage.calls)
        stop = start + count
        self.read_until: dict[int, int] = {}
        """The last call, or the end, at which the output of each call is read."""
        for producer, consumer in graph.edges:
            if start <= producer < stop:
                known = self.read_until.get(producer - start, 0)
                self.read_until[producer - start] = max(known, min(consumer - start, count))
        self.reads_shared = 0
        """How many calls of a block come before the last that reads a tensor of the model that later blocks read too;
        0: none does."""
        if stage.block is not None and start:
            later = {producer for producer, consumer in graph.edges if producer < start and consumer >= stop}
            read = [consumer - start for producer, consumer in graph.edges if producer in later]
            self.reads_shared = max((consumer for consumer in read if 0 <= consumer < count), default=0)


class StageCosts:
    """Costs of a stage's calls at one micro-batch, shared by all its options."""

    def __init__(self, frame: StageFrame, load: Workload) -> None:
        stage, batch, graph = frame.stage, load.micro_batch, frame.model.graph
        self.frame, self.stage, self.load = frame, stage, load
        self.saved = [*accumulate((call.saved_bytes(batch) for call in stage.calls), initial=0.0)]
        before = [None, *graph.calls][stage.start : stage.start + len(stage.calls)]
        self.incoming = [call.output_bytes(batch) if call else 0.0 for call in before]
        # Gradients of activations that are left when the backward of a call is over.
        self.outgoing = [
            max(0.0, call.backward_start_bytes(batch) - call.saved_bytes(batch)) if call else 0.0 for call in before
        ]
        self.backward_start = [call.backward_start_bytes(batch) for call in stage.calls]
        self.module_backward_start = [call.module_backward_start_bytes(batch) for call in stage.calls]
        self.output = [call.output_bytes(batch) for call in stage.calls]
        self.forward_peak = [call.forward_peak(batch) for call in stage.calls]
        self.backward_peak = [call.backward_peak(batch) for call in stage.calls]
        self.module_forward_peak = [call.module_forward_peak_bytes(batch) for call in stage.calls]
        self.module_backward_peak = [call.module_backward_peak_bytes(batch) for call in stage.calls]
        self.tail_forward_peak = [call.tail_forward_peak_bytes(batch) for call in stage.calls]
        self.tail_backward_peak = [call.tail_backward_peak_bytes(batch) for call in stage.calls]
        seconds = [load.call_s(graph, call) for call in stage.calls]
        self.forward_s, self.backward_s = map(list, zip(*seconds, strict=True))
        self.handed = self._handed()
        self.block_input = self.block_saved = self.block_extra = 0.0
        if stage.block is not None:
            block = graph.blocks[stage.block]
            self.block_input = block.input_bytes(batch)
            # Recomputation keeps of it what calls below do not keep anyway.
            self.block_saved = max(0.0, self.block_input - block.kept_below_bytes(batch))
            # The part of that which is held in addition to what the first call saves when the block is recomputed.
            self.block_extra = max(0.0, self.block_saved - min(self.saved[1], block.saved_first_bytes(batch)))
        self.withheld = self._withheld()
        self.activations = cache(self._activations)

    def _handed(self) -> list[float]:
        """Return, for every call, the bytes of outputs of earlier calls of the stage that it or later ones read."""
        until, count = self.frame.read_until, len(self.stage.calls)
        return [sum(self.output[p] for p, last in until.items() if p < j <= last) for j in range(count)]

    def _withheld(self) -> list[float]:
        """Return, for every call of a block, the bytes of input gradients not yet added to those of other blocks.

        Where several blocks read one tensor (an encoder's output), autograd adds up its gradients as they arrive; but
        FSDP2 passes on those of a block that it wraps whole only when all of its inputs have one.  From the
        backward of the block's last call that reads the tensor, there are two gradients of it.
        """
        stage, graph = self.stage, self.frame.model.graph
        if not self.frame.reads_shared:
            return [0.0] * len(stage.calls)
        # Bytes of the block's inputs besides the output of the call before it.
        room = max(0.0, self.block_input - graph.calls[stage.start - 1].output_bytes(self.load.micro_batch))
        return [room if j < self.frame.reads_shared else 0.0 for j in range(len(stage.calls))]

    def _activations(self, recompute: bool, is_whole: bool) -> dict[Live, float]:
        """Return the bytes of activations that are alive at the moments of `planner.cost.stage_memory`.

        `is_whole` is for a block that is one unit.
        """
        found: dict[Live, float] = {NO_ACTIVATIONS: 0.0}
        extra, around = self.block_extra if recompute else 0.0, self.block_extra + self.output[-1]
        for j, saved in enumerate(self.saved[:-1]):
            # Recomputed, nothing is saved but the input; what is still to be read lives.
            held = min(saved, self.block_saved + self.handed[j]) if recompute else saved
            own, withheld = self.saved[j + 1] - saved, self.withheld[j] if is_whole else 0.0
            if not is_whole:
                unsharding = extra + saved + self.module_backward_start[j]
            elif recompute:  # It is gathered first, and then runs again.
                unsharding = self.block_saved + self.backward_start[j] - own
            else:
                unsharding = saved + self.backward_start[j]
            at: dict[str, float] = {
                "gather": saved + self.incoming[j],
                "call": held + self.forward_peak[j],
                "module": held + self.module_forward_peak[j],
                "tail": held + self.tail_forward_peak[j],
                "gather again": around + saved + self.incoming[j],
                "call again": around + saved + self.forward_peak[j],
                "before again": self.block_saved + max(0.0, self.module_backward_start[j] - own),
                "backward of tail": saved + self.tail_backward_peak[j],
                "unshard": unsharding,
                "backward of call": extra + saved + self.backward_peak[j] + withheld,
                "backward of module": extra + saved + self.module_backward_peak[j] + withheld,
                "reduction": extra + saved + self.outgoing[j] + withheld,
            }
            found |= {(name, j): bytes_alive for name, bytes_alive in at.items()}
        return found
