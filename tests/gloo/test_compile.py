"""torch.compile on blocks gives the same training."""

from __future__ import annotations

import shutil

import pytest
import torch
from parity import Case, blocks_of, compare, reference, train_all
from ranks import run_ranks
from thoroughness import THOROUGH, some
from toys import Blocks, batch_of, plan_of, seeded


def test_compiled_blocks_train_the_same() -> None:
    """Sharded, replicated, and mixed and recomputed; others with --thorough."""
    keywords = {"compile_backend": "aot_eager"}
    blocks = tuple(blocks_of("gpt2"))
    linear = f"{blocks[1]}.mlp_up"
    cases = [
        Case("gpt2", {}, "shard", keywords=keywords, nodes=1),
        Case("gpt2", {}, "shard_grad", keywords=keywords, nodes=1),
        Case("gpt2", {}, "replicate", keywords=keywords, nodes=1),
        Case("gpt2", {}, "shard", recomputed=blocks, keywords=keywords, nodes=1),
        Case("gpt2", {linear: "owner"}, "shard", recomputed=blocks, keywords=keywords, nodes=1),
    ]
    cases = some(cases, 2)
    results = run_ranks(train_all, 2, cases, [case.plan() for case in cases], timeout_s=240)[0]
    for result, _ in results:
        compare(result, reference("gpt2", 2, 1))


def train_by_inductor(rank: int) -> None:
    """Compare two steps of a model whose second block is compiled with two of the model as it is."""
    import torch._inductor.config

    from osdp import OSDP

    torch._inductor.config.cpp_cache_precompile_headers = False  # for two kernels they take longer than they save
    model = OSDP(
        seeded(Blocks),
        plan_of(Blocks(), "shard", {"blocks.0.up": "replicate"}, ranks=(1, 2)),
        compile_backend="inductor",
    )
    reference = seeded(Blocks)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step in range(2):
        (args, _), (others, _) = batch_of(reference, rank, step), batch_of(reference, 1 - rank, step)
        model(*args).backward()
        ((reference(*args) + reference(*others)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = model.full_state_dict(rank0_only=False)
    torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


# Another backend on the same graphs, which compiles for half a minute.
@pytest.mark.skipif(not THOROUGH, reason="of backends, another, with --thorough only")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    run_ranks(train_by_inductor, 2, timeout_s=300)


def count_graphs(rank: int) -> int:
    """Return how many graphs a compiled model's forward runs."""
    from parity import initial, inputs

    from osdp import OSDP

    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        def run(*args: torch.Tensor) -> object:
            graphs.append(graph)
            return graph.forward(*args)

        return run

    model = OSDP(initial("gpt2"), Case("gpt2", {}, "shard", nodes=1).plan(), compile_backend=backend)  # type: ignore[arg-type]
    args, kwargs = inputs(model.module, 2)
    model(*args, **kwargs)
    return len(graphs)


def test_blocks_are_compiled_whole() -> None:
    assert run_ranks(count_graphs, 2) == [2, 2]
