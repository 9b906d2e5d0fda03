"""Reduce-scatter as a ring of point-to-point transfers, for gloo, whose own moves as much as an all-reduce.

With n ranks and a tensor x of n chunks of s bytes, in step k = 1 .. n - 1 rank r

    sends      its partial sum of chunk r - k to rank r + 1 (in the first step that is its own x[r - 1])
    receives   rank r - 1's partial sum of chunk r - 1 - k, and adds its own x[r - 1 - k]

(all modulo n), so that after n - 1 steps rank r has the sum of chunk r.  Every rank sends (n - 1) s
bytes, half of what it does in an all-reduce.  Chunk c is added up in the order of ranks c + 1, c + 2,
.., c, so that the sum is the same in every run.

Nothing is allocated: partial sums lie alternately in the output and in the chunk that was sent first,
which is not needed any more.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError
from runtime.torch_compat import OrdinaryMemory, ReduceScatter

TAG = 0x05D9
"""Of all transfers, so that they are not mixed up with those of a user in the same group, which have 0 by default."""

end_after_one_step = False
"""Set in dry runs of a thousand ranks: no step allocates, so that one stands for all."""


def ring_reduce_scatter(
    output: Tensor, full: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce `full` (n s,) over the group and leave this rank's part in `output` (s,). A collective call.

    The part of `full` that belongs to the rank before is overwritten.  Both tensors must be contiguous
    and of one dtype, to which each addition is rounded.  Raises OsdpError for an operation that is
    neither SUM nor AVG.
    """
    # `op` goes left: a plain constant does not equal an object around one.
    is_mean, is_sum = op == dist.ReduceOp.AVG, op == dist.ReduceOp.SUM
    if not (is_mean or is_sum):
        what = "a ring reduce-scatter does not support this operation"
        advice = "set no gradient divide factor, or leave the reduction to the backend"
        raise OsdpError(what, got=str(getattr(op, "op", op)), expected="SUM or AVG", advice=advice)
    ranks, rank = group.size(), group.rank()
    chunks = full.view(ranks, output.numel())
    if ranks == 1:
        output.copy_(full)
        return
    partial, free = chunks[rank - 1], output
    for step in range(1, 2 if end_after_one_step else ranks):
        sent = dist.isend(partial, group=group, group_dst=(rank + 1) % ranks, tag=TAG)
        received = dist.irecv(free, group=group, group_src=(rank - 1) % ranks, tag=TAG)
        for transfer in (received, sent):
            assert transfer is not None  # this rank is in the group
            transfer.wait()
        # The last sum goes to the output, wherever it was received; what was sent is free now.
        torch.add(free, chunks[rank - 1 - step], out=output if step == ranks - 1 else free)
        partial, free = free, partial
    if is_mean:
        output.div_(ranks)


class RingReduceScatter(OrdinaryMemory, ReduceScatter):
    """Reduces the gradients of a `fully_shard` unit in a ring over its shards.

    FSDP2 makes the input for this one call, copies gradients into it, and afterwards only keeps it alive
    (`foreach_reduce` of torch 2.11 and 2.13), so that it may be overwritten.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` (n s,), which is overwritten, and leave this rank's part in `output_tensor` (s,)."""
        ring_reduce_scatter(output_tensor, input_tensor, op, group)
