"""The traced model: operators, their calls in execution order, blocks.

    nn.Module --trace--> ModelGraph --planner--> Plan

Every cost is a function of the micro-batch (`profiler.affine`): the tracer measures at two sizes and checks at a third.
Nothing here needs torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from profiler.affine import Affine

if TYPE_CHECKING:
    import networkx as nx


class Recompute(IntEnum):
    """What of a block's forward runs again in its backward; false if nothing does."""

    NOTHING = 0
    SELECTIVE = 1
    """All but matrix products, convolutions and attention, whose outputs are kept
    (`profiler.selective_recomputation`)."""
    EVERYTHING = 2
    OFFLOADED = 3
    """Everything, with what the block is handed in the host's memory until then (`profiler.offloaded_input`)."""


@cache
def _element_bytes(dtype: str) -> int:
    """Return the bytes of one element: the first number in a dtype's name is its bits."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True, slots=True, repr=False)
class Parameter:
    """One parameter tensor, under the name that the unsharded model gives it."""

    name: str
    """Fully qualified name, as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Unsharded shape."""
    trainable: bool = True
    """Whether it gets a gradient and optimizer state, where it is `used`."""
    dtype: str = "float32"
    """What it rests in, as torch names it."""
    keeps_dtype: bool = False
    """Whether it computes in that under mixed precision too."""
    used: bool = True
    """Whether the loss depends on it, if it is trained: its `.grad` stays None otherwise, and nothing steps it."""

    def __repr__(self) -> str:
        """Leave out what is as a rule, and `used`: fingerprints of models in fp32 are those of earlier versions."""
        text = f"Parameter(name={self.name!r}, shape={self.shape!r}, trainable={self.trainable!r}"
        text += f", dtype={self.dtype!r}" if self.dtype != "float32" else ""
        return text + (", keeps_dtype=True)" if self.keeps_dtype else ")")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element as it rests."""
        return _element_bytes(self.dtype)

    def is_cast(self, precision: str) -> bool:
        """Whether its module computes with a copy in another dtype."""
        return precision == "bf16" and not self.keeps_dtype and self.dtype != "bfloat16"

    def compute_bytes(self, precision: str) -> int:
        """Bytes of one element as its module computes with it."""
        return 2 if self.is_cast(precision) else self.element_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes of one element of its gradient as it is reduced: in fp32, or in its own dtype if that has more."""
        return max(4, self.element_bytes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operator:
    """A module that owns parameters, or several that share (tie) them."""

    name: str
    """Path of the (first) module that owns the parameters, e.g. `blocks.3.mlp.up`."""
    kind: str
    """Class name of that module, e.g. `Linear`; of what has that name and cannot be split, also why."""
    parameters: tuple[Parameter, ...]
    """Its parameters, tied ones once."""
    modules: tuple[str, ...]
    """Paths of all modules that must be wrapped together; more than one only when tied."""
    block: int | None
    """Index into `ModelGraph.blocks`, or None outside every block (and for operators tied across, or that one runs in
    which they do not lie)."""
    order: int = field(default=0, repr=False)
    """Place of its first parameter among all as they are registered: modules may run in another order.  In no
    fingerprint (`repr`), which are older: plans are for the same model still."""

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelCollective:
    """Collectives that the model's own code runs, of one kind in one direction of a call; the device waits for each."""

    operation: str
    """As of `planner.collectives`."""
    ranks: int
    """Of the group."""
    stride: int
    """Between neighbouring ranks of the group."""
    count: int
    size_bytes: Affine
    """Of all of them together: the whole tensors, gathered or not yet scattered."""

    @property
    def group(self) -> tuple[int, int]:
        """Ranks of the group, and their stride."""
        return self.ranks, self.stride


@dataclass(frozen=True, slots=True)
class Work:
    """The device work of one direction of a call."""

    matmul_flops: Affine
    """Floating-point operations of matrix products, convolutions and attention."""
    matmul_bytes: Affine
    """Bytes that those read and write."""
    other_bytes: Affine
    """Bytes that all other kernels (normalisation, activation, residuals, loss) read and write."""
    launches: int = field(default=0, repr=False)
    """How many kernels it launches, at any micro-batch: operations of PyTorch that read or write memory.  Not part of
    fingerprints and keys, which are older."""
    collectives: tuple[ModelCollective, ...] = field(default=(), repr=False)
    """Those of the model's own.  Not part of them either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """The activations of one execution of an operator.  Bytes leave parameters out."""

    saved_bytes: Affine
    """Activations that are kept for backward because of this call, and not of an earlier one."""
    held_bytes: Affine = Affine()
    """The part of those that the model's own forward holds on to until it is over, which its peaks count."""
    opening_forward_peak_bytes: Affine = Affine()
    """Highest live bytes while its block, of which this is the first call, runs forward to it, less what earlier calls
    saved."""
    opening_backward_peak_bytes: Affine = Affine()
    """The same in the backward of that, without gradients of parameters."""
    opening_backward_end_bytes: Affine = Affine()
    """The same when that is over."""
    forward_start_bytes: Affine
    """Live bytes when the forward begins, less what earlier calls saved."""
    forward_peak_bytes: Affine
    """Highest live bytes while the forward runs, less what earlier calls saved."""
    module_forward_peak_bytes: Affine
    """The same until the operator's own module has ended."""
    rest_forward_peak_bytes: Affine
    """The same from then on until its block has ended, of the last call in a block."""
    tail_forward_peak_bytes: Affine
    """The same from then on.

    What follows the module (the loss, for a head), or the block, runs when its parameters may be sharded again.
    """
    backward_peak_bytes: Affine
    """Highest live bytes while the backward runs, less what earlier calls saved.

    Counts this call's own saved activations, gradients of activations, temporaries, and the
    gradients of this call's own parameters in the parameter dtype, unsharded.  Leaves out the
    gradient of a tied parameter that waits, from its last call to its first, for the rest.
    """
    module_backward_peak_bytes: Affine
    """The same from when the backward reaches the operator's own module."""
    rest_backward_peak_bytes: Affine
    """The same until then, from when it reaches the block of which this is the last call."""
    tail_backward_peak_bytes: Affine
    """The same until then.

    The backward of what follows the module (the loss, for a head) runs before its parameters are
    needed, and so before they are gathered.
    """
    backward_start_bytes: Affine
    """Live bytes when the backward begins, less what earlier calls saved: own saved activations and gradients."""
    rest_backward_start_bytes: Affine
    """The same when it reaches the block of which this is the last call, or else the operator's own module."""
    module_backward_start_bytes: Affine
    """The same when it reaches the operator's own module."""
    backward_end_bytes: Affine
    """The same when it is over."""
    module_backward_end_bytes: Affine
    """The same before the gradient that it returns is added to one that waits for it, as a residual connection's does.

    FSDP2 reduces the gradients of a module then.
    """

    def forward_peak(self, micro_batch: int) -> float:
        """Return the peak of the forward as the highest of its parts, tighter than `forward_peak_bytes`."""
        return max(self.forward_parts(micro_batch))

    def backward_peak(self, micro_batch: int) -> float:
        """Return the peak of the backward as the highest of its parts, tighter than `backward_peak_bytes`."""
        return max(self.backward_parts(micro_batch))

    def forward_parts(self, micro_batch: int) -> tuple[float, float, float]:
        """Return the peaks of the forward in the module, in the rest of its block and after that."""
        parts = self.module_forward_peak_bytes, self.rest_forward_peak_bytes, self.tail_forward_peak_bytes
        module, rest, tail = (part(micro_batch) for part in parts)
        return module, rest, tail

    def backward_parts(self, micro_batch: int) -> tuple[float, float, float]:
        """Return the peaks of the backward in the same parts."""
        parts = self.module_backward_peak_bytes, self.rest_backward_peak_bytes, self.tail_backward_peak_bytes
        module, rest, tail = (part(micro_batch) for part in parts)
        return module, rest, tail


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemories(CallMemory):
    """The same whether its block is recomputed or not."""

    recomputed: CallMemory | None = None
    """Its activations if its block is recomputed."""
    selective: CallMemory | None = None
    """The same if its block is recomputed selectively."""

    def memory(self, recompute: Recompute) -> CallMemory | None:
        """Return its activations if its block is recomputed so; None if the block was not seen to be."""
        match recompute:
            case Recompute.NOTHING:
                return self
            case Recompute.SELECTIVE:
                return self.selective
            case Recompute.EVERYTHING | Recompute.OFFLOADED:
                return self.recomputed


@dataclass(frozen=True, slots=True)
class OwnRerun:
    """A part of the model that it runs again itself as a call runs back, in a checkpoint of its own."""

    blocks_back: int | None
    """How many blocks before that of the call, or before the first if it is in none; None: outside all."""
    operator: int | None
    """Of what lies outside of all blocks, the operator."""
    peak_bytes: Affine
    """Highest live bytes meanwhile, as of the call's backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallMemories):
    """One execution of an operator and of the parameter-free computation that follows it.

    A tied operator (embedding and head) has several calls.
    """

    operator: int
    """Index into `ModelGraph.operators`."""
    block: int | None
    """Index into `ModelGraph.blocks`, or None outside every block."""
    forward: Work
    """Device work of the forward."""
    backward: Work
    """Device work of the backward (without recomputation)."""
    output_bytes: Affine
    """Bytes of the activation handed to the next call (its gradient is as large)."""
    retaken_bytes: Affine = Affine()
    """The part of `saved_bytes` that its block keeps where it is recomputed selectively, and takes up as it runs
    again."""
    shared_bytes: Affine = Affine()
    """What it keeps beside `saved_bytes` if its block is kept and another of `sharers` recomputed."""
    sharers: tuple[int, ...] = ()
    """Indices of the blocks that take that, as they take a mask; of these its own is the first."""
    apart: CallMemories | None = None
    """Its activations if gradients of what its block is handed leave that one by one, and not together, as they do if
    the block is not wrapped as one unit; None if they are the same."""
    reads_parameters: bool = True
    """Whether it computes with parameters of its operator, and its backward makes gradients of them.  Not so where a
    module that is around others begins or ends, for which its parameters are gathered."""
    late: bool = False
    """Whether its module is handed nothing that needs a gradient, so that no gradient tells when its backward is over:
    FSDP2 keeps its parameters and their gradients until all backward is."""
    without_backward: bool = False
    """Whether no backward comes to its module: the loss reads nothing that it returns, or nothing needs a gradient."""
    reopens: bool = False
    """Whether modules that share its operator's parameters have all run by now: FSDP2 has sharded these, and gathers
    them once more."""
    stays: bool = False
    """Whether, from such a call on, not all of them run again, so that nothing shards them before their backward."""
    occasional: bool = False
    """Whether some steps leave it out, which the model counts: a graph is of the step that takes most."""
    reruns: tuple[OwnRerun, ...] = ()
    """What the model runs again itself as this runs back, what is of the call's own block too."""
    slice_of: tuple[str, Call] | None = None
    """Of a slice, the call that it is a part of, with its key (`profiler.cluster.measurements.call_key`)."""

    def memories(self, *, is_whole: bool) -> CallMemories:
        """Return its activations, given whether its block is wrapped as one unit."""
        return self if is_whole or self.apart is None else self.apart


@dataclass(frozen=True, slots=True)
class Rerun:
    """The forward of a recomputed block, when it runs again in backward."""

    start_bytes: Affine
    """Live bytes when it begins, less what calls of earlier blocks saved."""
    peak_bytes: Affine
    """Highest live bytes while it runs, less the same."""
    in_tail: bool
    """Whether what follows the module of its last call needs it, as dropout does."""
    work: Work
    """Its device work; it ends with the last of what backward needs."""


UNSEEN_RERUN = Rerun(Affine(), Affine(), False, Work(Affine(), Affine(), Affine()))
"""Of a block that a plan recomputes and that was not seen to run again."""


@dataclass(frozen=True, slots=True)
class Block:
    """The repeated unit around operators (a transformer layer): the unit of recomputation."""

    name: str
    """Module path, e.g. `blocks.3`."""
    kind: str
    """Class name, e.g. `Block`."""
    first_call: int
    """Index of its first call in `ModelGraph.calls`."""
    last_call: int
    """Index one past its last call."""
    input_bytes: Affine
    """Bytes of the tensors passed in: recomputation keeps them."""
    block_class: int
    """Blocks with equal numbers have the same structure and costs."""
    rerun: Rerun | None = None
    """Its forward as it runs again if it is recomputed; None if it was not seen to."""
    selective_rerun: Rerun | None = None
    """The same if it is recomputed selectively."""
    apart_rerun: Rerun | None = None
    """`rerun` if it is not wrapped as one unit (`Call.apart`); None if that is the same."""
    apart_selective_rerun: Rerun | None = None
    """The same of `selective_rerun`."""
    late: bool = False
    """Whether it is handed nothing that needs a gradient (`Call.late`)."""
    opening_bytes: Affine = Affine()
    """By how much live bytes grow from where it begins to its first call."""
    offloadable_bytes: Affine = Affine()
    """The part of `input_bytes` that nothing holds from its forward to its backward but the block, recomputed, itself:
    what there is to offload (`profiler.offloaded_input`)."""

    def runs_again(self, recompute: Recompute, *, is_whole: bool) -> Rerun:
        """Return its forward as it runs again, given whether it is wrapped as one unit; `UNSEEN_RERUN` if it was not
        seen to.
        """
        rerun, apart = self.rerun, self.apart_rerun
        if recompute is Recompute.SELECTIVE:
            rerun, apart = self.selective_rerun, self.apart_selective_rerun
        found = rerun if is_whole or apart is None else apart
        return UNSEEN_RERUN if found is None else found


@dataclass(frozen=True)
class ModelGraph:
    """A traced model. Made by `profiler.trace.trace.trace_model`; plain data, no tensors."""

    SCHEMA: ClassVar[str] = "osdp.model_graph/3"

    name: str
    """As the user named it on the command line."""
    precision: str
    """That of `profiler.mixed_precision` which was traced: `fp32`, `bf16`, `amp-bf16` or `amp-fp16`."""
    sequence_length: int
    """Tokens per sample (1 where the model has no sequence)."""
    operators: tuple[Operator, ...]
    """All operators, in order of first execution."""
    calls: tuple[Call, ...]
    """All calls in execution order."""
    blocks: tuple[Block, ...]
    """All blocks in execution order; their call ranges do not overlap."""
    edges: tuple[tuple[int, int], ...]
    """Data flow between calls, (producer, consumer) indices."""
    fingerprint: str
    """Hash of the structure (names, shapes, kinds, costs): tells whether a plan is for this model."""
    notes: tuple[str, ...] = ()
    """What the tracer assumed or could not trace, for the user."""
    master_weights: str = ""
    """What trained parameters of fewer bits rest in: `fp32`, or empty for the dtype that they have."""
    outside: tuple[Parameter, ...] = ()
    """Parameters that no operator has, so that every rank holds them whole: without dimensions, or of another dtype
    than the others of their module."""
    buffers: tuple[Parameter, ...] = ()
    """Buffers and tensors in plain attributes, which every rank holds whole, as parameters that are not trained."""
    left_out: tuple[str, ...] = ()
    """Operators that a forward leaves out if data decides so, as experts that get no tokens, or the rank."""
    written: tuple[str, ...] = ()
    """Parameters that a step of the model itself changes: where they are sharded, it changes copies of them."""
    held_elsewhere: tuple[str, ...] = ()
    """By what else than the modules that own them parameters are reached, a sentence each: where they are sharded, that
    is another tensor."""
    uncalled: tuple[str, ...] = ()
    """Paths of modules that share parameters with modules that run, and never run themselves."""

    autocast: str = ""
    """Dtype that `torch.autocast` has products compute in, `bf16` or `fp16`; empty: no forward asks for it."""

    world_size: int = 0
    """Ranks that collectives of the model's own were traced over; 0: none ran."""

    left_bytes: Affine = Affine()
    """What outlives a step in the model otherwise than in buffers, as states for the next one, attention maps to look
    at, or in reference cycles.  What calls take leaves it out: where that of the step before is gone, they take less.
    """
    cycle_bytes: Affine = Affine()
    """The part of those which only reference cycles hold, so that those of several micro-batches add up."""

    @property
    def held_whole(self) -> tuple[Parameter, ...]:
        """What every rank holds whole, whatever the plan."""
        return self.outside + self.buffers

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the operators that run."""
        return tuple(dict.fromkeys(self.operators[call.operator].name for call in self.calls))

    @cached_property
    def numel(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(operator.numel for operator in self.operators) + sum(one.numel for one in self.outside)

    @cached_property
    def matmul_precision(self) -> str:
        """Whose rate products are priced at: autocast's, `bf16` if most elements compute in two bytes, or `fp32`."""
        if self.autocast:
            return self.autocast
        sizes = [(p.numel, p.compute_bytes(self.precision)) for o in self.operators for p in o.parameters]
        return "bf16" if 2 * sum(numel for numel, size in sizes if size == 2) > self.numel else "fp32"

    @cached_property
    def trains(self) -> bool:
        """Whether any parameter is trained; if none is, a step is a forward."""
        return any(parameter.trainable for operator in self.operators for parameter in operator.parameters)

    def dag(self) -> nx.DiGraph[Any]:
        """Return the calls as a networkx DAG; nodes are call indices with the operator's name."""
        import networkx as nx  # here, as it takes a tenth of a second and no plan needs it

        graph: nx.DiGraph[Any] = nx.DiGraph()
        for index, call in enumerate(self.calls):
            graph.add_node(index, operator=self.operators[call.operator].name, block=call.block)
        graph.add_edges_from(self.edges)
        return graph
