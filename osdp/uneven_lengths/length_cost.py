"""What a sample costs by its length, from a model and the rates of a cluster that was profiled or published.

The model is traced with one sample of L/4, L/2 and L tokens, L the longest, and its forward and backward are priced
by the roofline (`planner.cost.workload`), to t(l) seconds.  The parabola through these is

    t(l) = c + a l + b l^2,   cost(l) = a l + b l^2                                 `predicted_cost`

c is the same for every micro-batch, so that it has nothing to balance.  Where a or b would be negative, as where
short samples only wait for memory, it is 0, and the other goes through the first and the last of the three.
"""

from osdp.planning.clusters import load_cluster
from osdp.uneven_lengths.packing import Cost
from osdp.zoo import load_model
from planner.cost.workload import Workload
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model


def predicted_cost(model: str, cluster: str, longest: int, precision: str = "fp32") -> Cost:
    """Return what a sample costs, in predicted seconds of forward and backward on one device.

    Args:
        model: as for `osdp plan --model`.
        cluster: as for `osdp plan --cluster`: a name, or the file that `osdp profile` wrote.
        longest: tokens of the longest sample, at least 4.
        precision: `fp32` or `bf16`.

    Raises:
        OsdpError: for a model or a cluster that is not there, a length that the model cannot take, or seconds that do
            not grow with the length.
    """
    if longest < 4:
        raise OsdpError(
            "the longest sample is too short to tell its cost", got=f"{longest} tokens", expected="4 or more"
        )
    machine, lengths = load_cluster(cluster), (longest // 4, longest // 2, longest)
    seconds = []
    for length in lengths:
        graph = trace_model(load_model(model, sequence_length=length), precision, machine.device.kind)
        seconds.append(_computing_s(graph, machine, precision))
    per_token, per_square = parabola(lengths, seconds)
    if not per_token and not per_square:
        got = f"{seconds[0]:.3g} s for {lengths[0]} tokens, {seconds[-1]:.3g} s for {longest}"
        raise OsdpError(f"samples of {model} do not cost more if they are longer", got=got)
    return Cost(per_token, per_square)


def parabola(lengths: tuple[int, int, int], seconds: list[float]) -> tuple[float, float]:
    """Return a and b of the parabola through three points, neither below 0; both 0 if nothing grows."""
    (short, middle, longest), (first, second, last) = lengths, seconds
    slopes = (second - first) / (middle - short), (last - second) / (longest - middle)
    per_square = (slopes[1] - slopes[0]) / (longest - short)
    per_token = slopes[0] - per_square * (short + middle)
    if per_square < 0:
        return max(0.0, (last - first) / (longest - short)), 0.0
    if per_token < 0:
        return 0.0, max(0.0, (last - first) / (longest**2 - short**2))
    return per_token, per_square


def _computing_s(graph: ModelGraph, cluster: Cluster, precision: str) -> float:
    """Return the seconds of forward and backward of one sample, by the roofline at every length alike."""
    load = Workload(cluster, "adam", precision, micro_batch=1)
    works = [work for call in graph.calls for work in (call.forward, call.backward)]
    return sum(load.compute_s(work, graph.matmul_precision) for work in works)
