"""Selective recomputation: which outputs are kept, by hand; memory against dry runs; work against arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from rehearsals import Case, Compared, graph_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from trace_models import source

from planner.pins import parse_pin, resolve
from profiler.errors import OsdpError
from profiler.selective_recomputation import KeptOutputs, is_kept
from profiler.trace.trace import trace_model
from runtime.strategies.activation_checkpointing import _Keeping

aten = torch.ops.aten
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
BATCH, TOKENS, WIDTH = 3, 16, 8


# --- which --------------------------------------------------------------------------------------


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_products_convolutions_and_attention_are_kept() -> None:
    query = tensor(1, 2, TOKENS, WIDTH)
    assert is_kept(aten.mm.default, (tensor(4, 2), tensor(2, 4)), {})
    assert is_kept(aten.addmm.default, (tensor(4), tensor(4, 2), tensor(2, 4)), {})
    assert is_kept(aten.convolution.default, (tensor(1, 2, 4, 4), tensor(2, 2, 3, 3)), {})
    assert is_kept(aten._scaled_dot_product_flash_attention_for_cpu.default, (query, query, query), {})
    assert not is_kept(aten.gelu.default, (query,), {})
    assert not is_kept(aten.native_layer_norm.default, (query, [WIDTH], None, None, 1e-5), {})


def test_scores_of_attention_are_not_kept_and_its_result_is() -> None:
    query, scores = tensor(6, TOKENS, WIDTH), tensor(6, TOKENS, TOKENS)
    # 16 x 16 numbers made of two times 16 x 8 are as many as those; of longer sequences, more.
    assert is_kept(aten.bmm.default, (query, query.transpose(1, 2)), {})
    longer = tensor(6, TOKENS + 1, WIDTH)
    assert not is_kept(aten.bmm.default, (longer, longer.transpose(1, 2)), {})
    assert not is_kept(aten.baddbmm.default, (scores, longer, longer.transpose(1, 2)), {})
    assert is_kept(aten.bmm.default, (scores, query), {})


@pytest.mark.parametrize(
    "op", [aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu]
)
def test_attention_that_draws_random_numbers_is_not_kept(op: torch._ops.OpOverloadPacket) -> None:
    query = tensor(1, 2, TOKENS, WIDTH)
    for dropout, kept in ((0.0, True), (0.1, False)):
        assert is_kept(op.default, (query, query, query, dropout), {}) is kept
        assert is_kept(op.default, (query, query, query), {"dropout_p": dropout}) is kept


# --- keeping ------------------------------------------------------------------------------------


def test_outputs_come_back_once_in_their_order() -> None:
    kept, one, two = KeptOutputs(), torch.ones(2, requires_grad=True) * 1, torch.zeros(2)
    kept.add(aten.mm.default, one)
    kept.add(aten.bmm.default, (two, 5, None))
    first = kept.take(aten.mm.default)
    assert first.data_ptr() == one.data_ptr()
    assert first.grad_fn is None
    assert kept.take(aten.bmm.default)[1:] == (5, None)
    with pytest.raises(OsdpError, match="something else"):
        kept.take(aten.mm.default)


def test_what_was_not_asked_for_is_given_up() -> None:
    kept = KeptOutputs()
    kept.add(aten.mm.default, torch.ones(2))
    kept.end()
    assert kept.take(aten.bmm.default) is None


def test_what_was_changed_in_place_does_not_come_back() -> None:
    kept, out = KeptOutputs(), torch.ones(2)
    kept.add(aten.mm.default, out)
    out.relu_()
    assert kept.take(aten.mm.default) is None


class Recurrent(nn.Module):
    """A recurrent layer, which cuts what its products return and changes the parts in place."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.up, self.layer = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> the same."""
        out: Tensor = self.layer(self.up(x))[0]
        return out


class Untold(nn.Module):
    """Changes what a product returned in ways that versions do not tell."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.up, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> the same."""
        out: Tensor = self.up(x)
        self.change(out)
        return out.sigmoid()


@pytest.mark.parametrize(
    "made",
    [
        lambda: Recurrent(nn.GRU),
        lambda: Recurrent(nn.LSTM),
        lambda: Recurrent(nn.RNN),
        lambda: Untold(lambda out: out.data.mul_(2.0)),
        lambda: Untold(lambda out: torch._foreach_mul_([out.data], 2.0)),
        lambda: Untold(lambda out: torch.unsafe_chunk(out.data, 2)[1].add_(1.0)),
        lambda: Untold(lambda out: torch.add(out.data, 1.0, out=out.data)),
        lambda: Untold(lambda out: torch.bmm(out.detach().clone(), out.new_ones(BATCH, WIDTH, WIDTH), out=out.data)),
    ],
)
def test_a_block_that_changes_its_products_untold_has_the_gradients_of_one_that_is_kept(
    made: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    block, x = made(), torch.randn(BATCH, TOKENS, WIDTH)

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(run().square().mean(), list(block.parameters())))

    def selective() -> Tensor:
        kept = KeptOutputs()
        contexts = _Keeping(kept), _Keeping(kept, again=True)
        out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=lambda: contexts)
        return out

    torch.testing.assert_close(gradients(selective), gradients(lambda: block(x)), rtol=0, atol=0)


# --- traced -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Norm, two products and a residual; with `in_place`, the activation changes what the first returned."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act: nn.Module = nn.ReLU(inplace=True) if in_place else nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> the same."""
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(in_place), Mlp(in_place)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_block_keeps_its_input_and_its_products(in_place: bool) -> None:
    graph = trace_model(source(lambda: Stack(in_place), (TOKENS, WIDTH)))
    block = graph.blocks[0]
    assert block.selective_rerun is not None
    assert block.rerun is not None
    held = [
        call.selective.saved_bytes(BATCH) for call in graph.calls[block.first_call : block.last_call] if call.selective
    ]
    # In fp32 the input, what `up` returns, four times as much, and what `down` does.
    assert sum(held) == 4 * BATCH * TOKENS * WIDTH * (1 + 4 + 1)
    product = 2 * BATCH * TOKENS * WIDTH * 4 * WIDTH
    assert block.rerun.work.matmul_flops(BATCH) == product  # `up`; the residual saves nothing, so `down` does not run
    assert block.selective_rerun.work.matmul_flops(BATCH) == (product if in_place else 0)


def test_what_runs_again_is_what_torch_counts() -> None:
    def backward_flops(again: bool) -> int:
        block, x = Mlp(in_place=False), torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        loss = (checkpoint(block, x, use_reentrant=False) if again else block(x)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    block = trace_model(source(lambda: Stack(in_place=False), (TOKENS, WIDTH))).blocks[0]
    assert block.rerun is not None
    assert block.rerun.work.matmul_flops(BATCH) == backward_flops(again=True) - backward_flops(again=False)


# --- predicted and run ----------------------------------------------------------------------------

CASES = [
    Case("shard", selective=1),
    Case("shard", selective=1, precision="bf16", micro_batch=3),
    Case("shard_grad", recompute=2, selective=1),
    Case("shard", (("blocks.*.mlp.*", "replicate"),), selective=2),
    Case("replicate", selective=1),
    Case("shard", family="llama", selective=1, accumulation=2),
    Case("group_shard:4", (("blocks.*.mlp.up", "shard"),), selective=1, shape=(2, 4)),
    Case("shard", (("layers.*.up", "replicate"),), family="bert", selective=1),
    Case("owner", family="uneven", selective=1),
]


@cache
def compared(case: Case) -> Compared:
    """Return what a plan was predicted to hold, and held."""
    return case.compare()


@pytest.mark.parametrize("case", some(CASES, 3), ids=str)
def test_memory_is_what_a_dry_run_holds(case: Case) -> None:
    assert -0.005 <= compared(case).error <= 0.03


def test_it_holds_more_than_whole_recomputation_and_less_than_none() -> None:
    nothing, some, every = (
        sum(compared(case).tracked.values())
        for case in (Case("shard"), Case("shard", selective=1), Case("shard", recompute=1))
    )
    assert every < some < nothing


def test_every_block_of_the_zoo_can_be_recomputed_selectively() -> None:
    for family in ("gpt2", "llama", "bert", "uneven"):
        assert all(block.selective_rerun for block in graph_of(family, 512, 32, "fp32").blocks)


def test_a_block_with_split_operators_is_refused() -> None:
    graph = graph_of("gpt2", 512, 128, "fp32")
    name = graph.blocks[0].name
    with pytest.raises(OsdpError, match="cannot be recomputed selectively: one of its operators is split"):
        resolve([parse_pin(f"{name}.mlp.up=split(2*shard)"), parse_pin(f"{name}=selective")], graph, cluster(1, 4))
    with pytest.raises(OsdpError, match="cannot be recomputed selectively: one of its operators is split"):
        Case("shard", ((f"{name}.mlp.up", "split(2*shard)"),), selective=1).compare()
