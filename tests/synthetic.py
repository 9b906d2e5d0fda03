"""Small model graphs written down by hand, for tests of the planner that need no torch."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.plan import Plan
from planner.pricing import decisions_of
from planner.strategies.spec import Strategy
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster, Device, Host, Launch, Link, Nccl
from profiler.cluster.figure import Figure
from profiler.model_graph import Block, Call, CallMemory, ModelGraph, Operator, Parameter, Rerun, Work

MB = 1 << 20


def call(
    operator: int,
    block: int | None,
    *,
    gflops: float,
    saved_mb: float,
    peak_mb: float | None = None,
    output_mb: float = 1.0,
) -> Call:
    """A call whose costs are all per sample; backward computes twice the forward."""
    peak_mb = saved_mb + 2 * output_mb if peak_mb is None else peak_mb
    return Call(
        operator=operator,
        block=block,
        forward=Work(Affine(0, gflops * 1e9), Affine(), Affine(), 2),
        backward=Work(Affine(0, 2 * gflops * 1e9), Affine(), Affine(), 3),
        saved_bytes=Affine(0, saved_mb * MB),
        forward_start_bytes=Affine(),
        forward_peak_bytes=Affine(0, (saved_mb + output_mb) * MB),
        module_forward_peak_bytes=Affine(0, (saved_mb + output_mb) * MB),
        rest_forward_peak_bytes=Affine(),
        tail_forward_peak_bytes=Affine(),
        backward_peak_bytes=Affine(0, peak_mb * MB),
        module_backward_peak_bytes=Affine(0, peak_mb * MB),
        rest_backward_peak_bytes=Affine(),
        tail_backward_peak_bytes=Affine(),
        backward_start_bytes=Affine(0, (saved_mb + output_mb) * MB),
        rest_backward_start_bytes=Affine(0, (saved_mb + output_mb) * MB),
        module_backward_start_bytes=Affine(0, (saved_mb + output_mb) * MB),
        backward_end_bytes=Affine(),
        module_backward_end_bytes=Affine(),
        output_bytes=Affine(0, output_mb * MB),
    )


def chained(calls: list[Call]) -> list[Call]:
    """Let every call begin with the output of the call before it, and end its backward with the gradient of that."""
    links = []
    for before, call in pairwise(calls):
        handed = before.output_bytes
        ends = {"backward_end_bytes": handed, "module_backward_end_bytes": handed}
        links.append(replace(call, forward_start_bytes=handed, **ends))
    return [*calls[:1], *links]


def selected(calls: list[Call], rerun: Rerun, share: float) -> tuple[list[Call], Rerun]:
    """Let a block's calls keep that share of what they save if they run again, which then leaves out their products."""
    found, kept = list[Call](), Affine()
    for call in calls:
        assert call.recomputed is not None
        own = call.saved_bytes.times(share)
        memory = replace(call.recomputed, saved_bytes=call.recomputed.saved_bytes + own)
        found.append(replace(call, selective=memory))
        kept += own
    work = Work(Affine(), Affine(), rerun.work.matmul_flops.times(0.001))
    return found, replace(rerun, start_bytes=rerun.start_bytes + kept, work=work)


def recomputed(calls: list[Call], input_bytes: Affine) -> tuple[list[Call], Affine, Affine]:
    """Return a block's calls with their memory where the block keeps its input alone, and that of its second forward.

    When it runs again there is the gradient of its output, and nothing of it is freed.
    """
    kept, found, again = Affine(), list[Call](), Affine()
    gradient = calls[-1].output_bytes
    for number, call in enumerate(calls):
        again = again.at_least(gradient + kept + call.forward_peak_bytes)
        held = kept + input_bytes.times(-1 if number else 0)
        before = held.at_least(Affine()) if number else Affine()
        handed = calls[number - 1].output_bytes if number else Affine()
        memory = {field.name: getattr(call, field.name) for field in fields(CallMemory)}
        memory |= {name: one + before for name, one in memory.items() if "backward" in name}
        memory |= {name: one + handed for name, one in memory.items() if "forward" in name and "peak" in name}
        memory["saved_bytes"] = Affine() if number else input_bytes
        found.append(replace(call, recomputed=CallMemory(**memory)))
        kept += call.saved_bytes
    return found, input_bytes + gradient, again


def operator(name: str, shape: tuple[int, ...], block: int | None = None) -> Operator:
    """An operator with one weight."""
    return Operator(name, "Linear", (Parameter(f"{name}.weight", shape),), (name,), block)


def chain(shapes: list[tuple[int, int]], gflops: list[float], saved_mb: list[float]) -> ModelGraph:
    """Operators one after another, outside blocks."""
    operators = tuple(operator(f"op{i}", shape) for i, shape in enumerate(shapes))
    calls = tuple(
        chained([call(i, None, gflops=g, saved_mb=s) for i, (g, s) in enumerate(zip(gflops, saved_mb, strict=True))])
    )
    edges = tuple((i, i + 1) for i in range(len(calls) - 1))
    return ModelGraph("chain", "fp32", 1, operators, calls, (), edges, "chain")


def transformer(
    layers: int,
    hidden: int,
    *,
    vocabulary: int = 4096,
    tied: bool = True,
    tokens: int = 1024,
    distinct: bool = False,
    selective: float | None = None,
    offloadable: bool = False,
) -> ModelGraph:
    """A GPT-like graph: embedding, `layers` blocks of six operators, norm and head.

    Blocks can be recomputed selectively if it is said what share of their activations they keep then, and all that is
    handed to them is `offloadable` or not.
    """
    operators = [operator("embed", (vocabulary, hidden))]
    unit_mb = 4 * tokens * hidden / MB
    calls = [call(0, None, gflops=0.001, saved_mb=0.01, output_mb=unit_mb)]
    blocks = []
    for layer in range(layers):
        inner = 2 * hidden + 4 * layer if distinct else 4 * hidden
        shapes = {
            "norm1": (hidden,),
            "qkv": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "norm2": (hidden,),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        units = {"norm1": 1, "qkv": 4, "out": 1, "norm2": 1, "up": 5, "down": 4}
        first = len(calls)
        for name, shape in shapes.items():
            calls.append(
                call(
                    len(operators),
                    layer,
                    gflops=2 * tokens * _numel(shape) / 1e9,
                    output_mb=unit_mb,
                    saved_mb=units[name] * unit_mb,
                )
            )
            operators.append(operator(f"blocks.{layer}.{name}", shape, layer))
        blocks.append((f"blocks.{layer}", first, len(calls), layer if distinct else 0))
    logits_mb = 4 * tokens * vocabulary / MB
    calls.append(call(len(operators), None, gflops=0.001, saved_mb=unit_mb, output_mb=unit_mb))
    operators.append(operator("norm", (hidden,)))
    head = 0 if tied else len(operators)
    if tied:
        operators[0] = replace(operators[0], modules=("embed", "head"))
    else:
        operators.append(operator("head", (vocabulary, hidden)))
    gflops = 2 * tokens * vocabulary * hidden / 1e9
    calls.append(call(head, None, gflops=gflops, saved_mb=unit_mb + logits_mb, peak_mb=3 * logits_mb))
    edges = tuple((i, i + 1) for i in range(len(calls) - 1))
    calls, found, unit = chained(calls), list[Block](), Affine(0, unit_mb * MB)
    for name, first, last, block_class in blocks:
        calls[first:last], start, peak = recomputed(calls[first:last], unit)
        work = Work(
            *(
                sum((getattr(one.forward, part.name) for one in calls[first:last]), Affine())
                for part in fields(Work)[:3]
            )
        )
        rerun = Rerun(start, peak, False, work)
        part = None
        if selective is not None:
            calls[first:last], part = selected(calls[first:last], rerun, selective)
        lone = unit if offloadable else Affine()
        found.append(Block(name, "Block", first, last, unit, block_class, rerun, part, offloadable_bytes=lone))
    return ModelGraph("transformer", "fp32", tokens, tuple(operators), tuple(calls), tuple(found), edges, "synthetic")


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def cluster(
    nodes: int = 1,
    gpus: int = 8,
    *,
    intra: float = 10e9,
    inter: float = 1e9,
    latency_s: float = 20e-6,
    flops: float = 10e12,
    overlaps: bool = True,
    memory_gib: float = 24,
    launch_s: float = 0.0,
    host: tuple[float, float] | None = None,
    nvlink: bool = False,
) -> Cluster:
    """A cluster of round numbers, with no reserve; `launch_s` is what the host takes for a kernel, and for more of a
    unit, and `host` are its rates of copies and of memory.
    """

    def figure(value: float) -> Figure:
        return Figure(value, "assumed: a round number for a test")

    device = Device(
        name="test device",
        kind="cuda",
        nominal_bytes=figure(memory_gib * 2**30),
        memory_bytes=figure(memory_gib * 2**30),
        matmul_flops_per_s={"fp32": figure(flops), "bf16": figure(4 * flops)},
        matmul_efficiency=figure(1.0),
        memory_bytes_per_s=figure(600e9),
        reserve_bytes={},
    )
    return Cluster(
        schema=Cluster.SCHEMA,
        name="test",
        description="for tests",
        nodes=nodes,
        gpus_per_node=gpus,
        device=device,
        intra=Link(figure(latency_s), figure(intra)),
        inter=Link(figure(latency_s), figure(inter)) if nodes > 1 else None,
        overlaps=overlaps,
        overlap_source="assumed: for a test",
        launch=Launch(*(figure(part * launch_s) for part in (1, 4, 0.5, 0.25))) if launch_s else None,
        host=Host(*map(figure, host)) if host else None,
        nccl=Nccl("hopper", nvlink=True, nvls=False, source="assumed: for a test") if nvlink else None,
    )


def options_of(plan: Plan, space: Space, load: Workload) -> tuple[tuple[StageCandidate, ...], tuple[Strategy, ...]]:
    """Return what a plan's choices cost, one option per stage, and the strategies of operators in several stages."""
    decisions = decisions_of(plan, space, load.cluster)
    return decisions.options(space, load, plan.usable_bytes), decisions.spanning
