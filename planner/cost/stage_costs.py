"""Costs of a stage's calls at one micro-batch, and of its units on one cluster."""

from __future__ import annotations

from itertools import accumulate

from planner.cost.unit_communication import UnitTraffic, unit_traffic
from planner.cost.unit_memory import UnitBytes, unit_bytes
from planner.cost.workload import Workload
from planner.model.stages import StagedModel
from planner.strategies.spec import Strategy

Costs = tuple[UnitBytes, UnitTraffic]


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


class StageCosts:
    """Costs of a stage's calls at one micro-batch, shared by all its options."""

    def __init__(self, model: StagedModel, index: int, load: Workload) -> None:
        stage, batch, graph = model.stages[index], load.micro_batch, model.graph
        self.model, self.stage, self.load = model, stage, load
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
        self.is_bottom = index == 0
        self.is_top = index == len(model.stages) - 1
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
        trained = {c.operator: [p for p in graph.operators[c.operator].parameters if p.trainable] for c in stage.calls}
        self.full_gradients = {
            operator: sum(p.compute_bytes(load.precision) * p.numel for p in parameters)
            for operator, parameters in trained.items()
        }

    def _handed(self) -> list[float]:
        """Return, for every call, the bytes of outputs of earlier calls of the stage that it or later ones read."""
        start, count = self.stage.start, len(self.stage.calls)
        until: dict[int, int] = {}
        for producer, consumer in self.model.graph.edges:
            if start <= producer < start + count:
                until[producer - start] = max(until.get(producer - start, 0), min(consumer - start, count))
        return [sum(self.output[p] for p, last in until.items() if p < j <= last) for j in range(count)]

    def _withheld(self) -> list[float]:
        """Return, for every call of a block, the bytes of input gradients not yet added to those of other blocks.

        Where several blocks read one tensor (an encoder's output), autograd adds up its gradients as they arrive; but
        FSDP2 passes on those of a block that it wraps whole only when all of its inputs have one.  From the
        backward of the block's last call that reads the tensor, there are two gradients of it.
        """
        stage, edges = self.stage, self.model.graph.edges
        start, stop = stage.start, stage.start + len(stage.calls)
        if stage.block is None or not start:
            return [0.0] * len(stage.calls)
        # Bytes of the block's inputs besides the output of the call before it.
        room = max(0.0, self.block_input - self.model.graph.calls[start - 1].output_bytes(self.load.micro_batch))
        later = {producer for producer, consumer in edges if producer < start and consumer >= stop}
        read = [consumer - start for producer, consumer in edges if producer in later and start <= consumer < stop]
        return [room if read and j < max(read) else 0.0 for j in range(len(stage.calls))]
