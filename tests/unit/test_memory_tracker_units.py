"""Predicted peak memory of plans that mix strategies, and split operators, against dry runs.

Blocks of several units, slices and blocks that run again unit by unit are priced from above: seen with
torch 2.13.0 in these cases from -0.02 % to +2.5 %.
"""

from __future__ import annotations

import pytest
from rehearsals import Case
from thoroughness import some

CASES = [
    # Inside blocks.
    Case("shard", (("*.mlp.*", "shard_grad"),)),
    Case("group_shard:4", (("*.attention.*", "secondary_shard:2"),), precision="bf16"),
    Case("shard_grad", (("*.mlp.*", "hierarchical"), ("wte", "replicate")), shape=(2, 4)),
    Case("hierarchical", (("*.attention.*", "owner"),), shape=(2, 4), family="llama", vocabulary=4096),
    Case("replicate", (("*.up", "owner"), ("*.down", "shard")), accumulation=2),
    Case("shard", (("*.mlp.*", "group_shard:16"), ("*_norm", "replicate")), shape=(8, 8), precision="bf16"),
    Case("shard", (("*.up", "shard+offload"), ("*.down", "shard+offload")), family="bert", vocabulary=4096),
    # Blocks of several units that run again.
    Case("shard", (("*.mlp.*", "shard_grad"),), recompute=1),
    Case("secondary_shard:4", (("*.mlp.*", "group_shard:2"),), recompute=1, precision="bf16"),
    Case("owner", (("*.attention.*", "shard"),), recompute=2, family="llama", vocabulary=4096),
    Case("secondary_shard:2", (("*.attention.*", "shard"),), recompute=1, length=64, micro_batch=1),
    Case("hierarchical", (("*.mlp.*", "shard_grad"),), shape=(2, 4), recompute=1, length=64, micro_batch=1),
    # A unit is gathered while what it will read is there, saved by none as yet.
    Case(
        "shard_grad",
        (("*.down", "secondary_shard:2"), ("*.value", "hierarchical"), ("*.output", "shard")),
        family="bert",
        vocabulary=64,
        length=32,
        shape=(2, 4),
        recompute=1,
    ),
    # Block by block, and around them.  FSDP2 prefetches past a block of owners.
    Case("shard", (("blocks.1.*", "owner"),), vocabulary=64, shape=(2, 4), optimizer="sgd"),
    Case("hierarchical", (("blocks.1.*", "owner"),), vocabulary=64, shape=(2, 4), precision="bf16", micro_batch=4),
    Case("shard", (("blocks.1.*", "replicate"), ("blocks.2.*", "shard_grad"))),
    Case("shard", (("blocks.0.*", "owner"), ("blocks.2.*", "group_shard:2")), recompute=2, accumulation=2),
    Case(
        "group_shard:2",
        (("lm_head", "owner"), ("embedding", "secondary_shard:4")),
        family="llama",
        vocabulary=8192,
        precision="bf16",
    ),
    Case("replicate", (("wte", "shard"),), vocabulary=50257, shape=(1, 4), length=64, micro_batch=1),
    # Slices.
    Case("shard", (("*.up", "split(2*shard)"),)),
    Case("shard", (("*.down", "split(2*shard, 2*replicate)"),), precision="bf16", shape=(1, 4)),
    Case("shard", (("lm_head", "split(4*shard)"),), family="llama", vocabulary=8192, length=64),
    Case("shard", (("lm_head", "split(2*owner)"),), family="llama", vocabulary=8192, length=64, precision="bf16"),
    Case("group_shard:2", (("*.mlp.*", "split(4*hierarchical)"),), recompute=1, shape=(2, 4)),
]


@pytest.mark.parametrize("case", some(CASES, 6, 1), ids=str)
def test_prediction_is_what_the_runtime_holds(case: Case) -> None:
    found = case.compare()
    assert -0.001 <= found.error <= 0.03
    for category in ("parameters", "optimizer"):
        assert found.predicted.get(category, 0) == found.tracked.get(category, 0)


def test_slices_are_gathered_one_at_a_time() -> None:
    """A head of 8192 x 256 in fp32 is 8 MiB; of its four slices one is unsharded, and one is gathered beside it."""
    whole, split = (
        Case("shard", (("lm_head", one), ("norm", "shard_grad")), family="llama", vocabulary=8192, length=64).compare()
        for one in ("shard", "split(4*shard)")
    )
    head, norm = 8 * 2**20, 4 * 256
    assert whole.tracked["unsharded_parameters"] in (head, head + norm)
    assert split.tracked["unsharded_parameters"] <= head // 4 + norm
    assert split.tracked["communication_buffers"] <= 2 * head // 4
