"""What the tracer assumes where shapes or Python values depend on data, against real tensors routed in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from experts import STYLES, InTurn, Mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsals import compare, plan_of
from synthetic import cluster
from test_trace_memory import predicted_peaks, tracked_peaks
from thoroughness import THOROUGH, draws
from torch import Tensor, distributions, nn
from trace_models import call_of, checks, source

from osdp.models.user_factory import source_of
from osdp.planning.plan_file import reopen
from osdp.planning.request import Request, plan_model
from osdp.planning.verify import verify
from osdp.zoo import load_cluster, load_model
from profiler.affine import Affine
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.dataless_device import FakeCpu
from profiler.trace.even_draws import spread
from profiler.trace.trace import trace_model

# --- choices --------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 20), st.integers(0, 200), st.sampled_from([1.0, 1.0, 1.3, 2.0, 9.0]))
@settings(max_examples=draws(60))
def test_choices_are_distinct_and_as_uneven_as_asked(
    data: st.DataObject, options: int, rows: int, imbalance: float
) -> None:
    chosen = data.draw(st.integers(1, options))
    table = spread(rows, chosen, options, imbalance)
    assert table.shape == (rows, chosen)
    assert all(len(set(row)) == chosen for row in table.tolist())
    loads = table.flatten().bincount(minlength=options).tolist()
    assert len(loads) == options
    assert sum(loads) == rows * chosen
    if imbalance == 1:
        assert max(loads) - min(loads) <= 1
        columns = [table[:, :width].flatten().bincount(minlength=options) for width in range(1, chosen + 1)]
        assert rows % options or all(len(set(column.tolist())) == 1 for column in columns), "columns are even, too"
    else:
        assert loads[-1] == min(rows, math.ceil(round(imbalance * rows * chosen / options, 9)))
        assert options == 1 or max(loads[:-1]) - min(loads[:-1]) <= 1


def experts(style: str, count: int, chosen: int, tokens: int, hidden: int = 64, layers: int = 1) -> ModelSource:
    shape = (tokens, 16) if tokens > 1 else (16,)
    return source(lambda: Mixture(16, hidden, count, chosen, style, layers=layers), shape)


WAYS = [*product(STYLES, ((4, 1), (4, 2), (6, 2), (8, 3)), (1, 5, 16, 48))]
"""How experts are written, how many there are and are chosen, and tokens."""
FEW_WAYS = [
    ("where", (8, 3), 16),
    ("hit", (6, 2), 16),
    ("mask", (4, 2), 48),
    ("sort", (4, 2), 48),
    ("counts", (8, 3), 16),
    ("sparse", (6, 2), 48),
    ("grouped", (6, 2), 16),
    ("where", (4, 1), 1),
    ("counts", (4, 1), 5),
]
"""Every one of each, and every style with tokens enough that what it holds is more than roundings."""


@pytest.mark.parametrize(("style", "count_chosen", "tokens"), WAYS if THOROUGH else FEW_WAYS)
def test_every_way_of_writing_experts_computes_and_holds_what_it_does_in_turn(
    style: str, count_chosen: tuple[int, int], tokens: int
) -> None:
    count, chosen = count_chosen
    model = experts(style, count, chosen, tokens)
    graph = trace_model(model)
    # By hand: the first layer, the router, and k experts of two layers for each token.
    flops = tokens * (2 * 16 * 16 + 2 * 16 * count + chosen * 2 * 2 * 16 * 64)
    assert sum(call.forward.matmul_flops(7) for call in graph.calls) == pytest.approx(7 * flops)
    if style != "grouped":  # nothing of that depends on data but how the rows are grouped
        assert any(f"of {count}" in note and "evenly" in note for note in graph.notes)
        for index in range(count):
            per_sample = call_of(graph, f"layers.0.experts.{index}.0").forward.matmul_flops.per_sample
            assert per_sample == pytest.approx(
                tokens * chosen / count * 2 * 16 * 64, rel=0.5 if style == "sort" else 1e-9
            )
    skipped = {f"layers.0.experts.{i}.{part}" for i in range(chosen, count) for part in (0, 2)}
    assert set(graph.left_out) == (skipped if style in ("hit", "mask") else set())
    batch = 8 * count
    with InTurn():
        tracked = tracked_peaks(model, batch)
    for traced, real in zip(predicted_peaks(graph, batch), tracked, strict=True):
        # Tensors are rounded up to 512 bytes; an expert's backward holds a dozen.
        assert real <= traced <= 1.01 * real + 12 * 512 * count


@pytest.mark.parametrize("style", ["where", "counts"])
def test_the_largest_load_is_an_option(style: str) -> None:
    graph = trace_model(experts(style, 4, 2, 12), expert_imbalance=1.5)
    flops = [call_of(graph, f"layers.0.experts.{i}.0").forward.matmul_flops.per_sample for i in range(4)]
    # At the smallest traced micro-batch, 24 tokens choose 2 of 4: 12 each, or 18 for one and 30 for three.
    assert flops == pytest.approx([2 * 16 * 64 * load / 2 for load in (10, 10, 10, 18)])
    assert any("1.5 times the mean" in note for note in graph.notes)
    for wrong in (0.5, math.nan, math.inf):
        with pytest.raises(OsdpError, match="imbalance"):
            trace_model(experts(style, 4, 2, 12), expert_imbalance=wrong)


def test_a_plan_keeps_the_largest_load_and_the_runtime_holds_what_it_says() -> None:
    request = Request(2**34, micro_batch=64, expert_imbalance=1.5)
    plan = plan_model(load_model("experts:made"), load_cluster("cpu-gloo", 1, 2), request).plan
    view = reopen(plan)  # traces it again, as it was asked for
    as_planned = verify(view)
    assert as_planned.is_close
    assert verify(view, expert_imbalance=3.0).tracked_peak_bytes > 1.02 * as_planned.tracked_peak_bytes


# --- values that are known ------------------------------------------------------------------------


class Then(nn.Module):
    """A linear layer of 8, then whatever."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x)).sum()


def traced(then: Callable[[Tensor], Tensor]) -> ModelGraph:
    """Trace a layer of 8 and what follows on (batch, 5, 8)."""
    return trace_model(source(lambda: Then(then), (5, 8)))


def refuse(*anything: Any) -> Tensor:
    raise AssertionError("the wrong branch")


@pytest.mark.parametrize(
    "then",
    [
        lambda x: x if torch.ones(5, device=x.device).all() else refuse(),
        lambda x: refuse() if (torch.arange(5, device=x.device).diff() != 1).any() else x,
        lambda x: x[:, : int(torch.tensor([1, 2, 2], device=x.device).sum())],
        lambda x: x[:, torch.tensor([True, True, False, True, True]).to(x.device)],
        lambda x: x[:, torch.arange(5, device=x.device) != 3],
        lambda x: x[:, : len(torch.arange(9, device=x.device).remainder(4).unique())],
        lambda x: x[:, : torch.full((), 4, device=x.device).item()],
        lambda x: x[:, : len(torch.zeros_like(x[0, :, 0]).index_fill_(0, torch.tensor([1]), 1.0).eq(0).nonzero())],
        lambda x: x[:, torch.arange(4, device=x.device).numpy()],
        lambda x: x[:, torch.arange(4, device=x.device).cpu().numpy().tolist()],
        lambda x: x[:, torch.arange(4, device=x.device).tolist()],
        lambda x: refuse() if x.isnan().any() or not torch.isfinite(x).all() else x[:, :4],
        lambda x: x[:, : int(torch.ones(4).to("cuda").sum())].to("cuda:0").cuda(),
        lambda x: x.cpu().half().float()[:, torch.arange(4).cuda()],
        lambda x: x.tensor_split(torch.tensor([4], device=x.device), 1)[0],
        lambda x: x[:, :4] if x.new_tensor(True) else refuse(),
    ],
)
def test_what_follows_from_shapes_and_constants_is_exact(then: Callable[[Tensor], Tensor]) -> None:
    graph = traced(then)
    assert graph.notes == ()
    assert graph.calls[0].forward.matmul_flops == Affine(0, 5 * 2 * 8 * 8)


def test_what_is_written_later_is_known_or_forgotten() -> None:
    def then(x: Tensor) -> Tensor:
        mask = torch.zeros(5, dtype=torch.bool)
        view = mask[2:]
        view[0] = True
        mask |= torch.arange(5) == 4
        assert mask.tolist() == [False, False, True, False, True]
        view.copy_(x[0, 2:, 0] > 0)
        with pytest.raises(RuntimeError, match="bool"):
            bool(mask.any())
        return x

    assert traced(then).notes == ()


def test_names_are_made_of_known_numbers() -> None:
    def then(x: Tensor) -> Tensor:
        assert [f"expert_{index}" for index in torch.arange(2)] == ["expert_0", "expert_1"]
        assert f"{torch.tensor(0.25):.1f}" == "0.2"
        assert "meta" in f"{x.sum()}"  # a message of no consequence
        return x

    assert traced(then).notes == ()


def test_constants_of_a_live_model_and_of_its_inputs_are_known() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("kept", torch.tensor([True, False, True, True, False]))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.layer(x[:, self.kept][:, : int(lengths.max())]).sum()

    def inputs(batch: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 5, 8), torch.full((batch,), 2)

    for model in (Model(), Model):
        graph = trace_model(source_of(model, "model", None, inputs))
        assert graph.calls[0].forward.matmul_flops == Affine(0, 2 * 2 * 8 * 8)


# --- values that are not --------------------------------------------------------------------------


def test_what_distributions_are_given_is_valid() -> None:
    def loss(y: Tensor) -> Tensor:
        scale = F.softplus(y)
        normal = distributions.Normal(y, scale)
        mixture = distributions.MixtureSameFamily(distributions.Categorical(logits=y), normal)
        others = distributions.Gamma(scale, scale), distributions.StudentT(2 + scale, y, scale)
        priors = distributions.kl_divergence(normal, distributions.Normal(torch.zeros_like(y), 1.0))
        return (
            sum(one.log_prob(one.rsample().detach()).mean() for one in (normal, *others))
            - mixture.log_prob(y[..., 0].detach()).mean()
            + distributions.Bernoulli(logits=y).log_prob((y > 0).float()).mean()
            + priors.mean()
        )

    is_checked = distributions.Distribution._validate_args
    graphs = []
    for checked in (True, False):
        distributions.Distribution.set_default_validate_args(checked)
        graphs.append(traced(loss))
    distributions.Distribution.set_default_validate_args(is_checked)
    assert [len(graph.calls) for graph in graphs] == [1, 1]
    saved = [call.saved_bytes(64) for graph in graphs for call in graph.calls]
    assert saved[0] == saved[1] > 0  # asking whether they are valid keeps nothing
    assert not any("branch" in note for note in graphs[0].notes)


def test_decompositions_succeed_and_floating_point_tensors_differ() -> None:
    """As Gaussian processes ask: are both inputs of a kernel one, was a matrix positive definite?"""

    def then(x: Tensor) -> Tensor:
        products = x @ x.mT
        assert torch.equal(products, products)
        assert torch.allclose(x[0], x[0])
        for a, b in ((x, x + 1), (x[:1], x[1:2]), (x, x.clone())):
            assert not torch.equal(a, b)
        noise = torch.eye(products.shape[-1])
        for _ in range(4):
            root, failed = torch.linalg.cholesky_ex(products + noise)
            if not torch.any(failed):
                break
            noise = 10 * noise
        else:
            raise ValueError
        for info in (torch.linalg.inv_ex(products)[1], torch.linalg.lu_factor_ex(products)[2]):
            if info.max().item() == 0:
                root = root + products
        return torch.linalg.solve(root, x)

    assert traced(then).notes == ("tensors of floating-point numbers that are compared are assumed to differ",)
    with pytest.raises(OsdpError, match=r"whether tensors are equal \(line \d+ of test_data_dependent.py\)"):
        traced(lambda x: x if torch.equal(x > 0, x > 1) else x.exp())


def not_(value: bool) -> bool:
    """Make of a value what only its code says."""
    return not value


def test_what_a_forward_checks_is_valid() -> None:
    """Where nothing but an exception follows otherwise; else a branch is refused."""

    def decided(x: Tensor) -> Tensor:
        if x.mean() > 0:
            return x.tanh()
        return x

    def either(x: Tensor) -> Tensor:
        return x.tanh() if (x > 0).all() else x.exp()

    def turned(x: Tensor) -> Tensor:
        assert not_(bool((x > 0).all()))
        return x

    assert traced(checks).calls[0].saved_bytes(64) == traced(lambda x: x).calls[0].saved_bytes(64)
    for then in (decided, either, turned):
        with pytest.raises(OsdpError, match="a branch depends on data"):
            traced(then)


@pytest.mark.parametrize(
    ("then", "elements", "note"),
    [
        (lambda x: x[x > 0], 40, "select everything"),
        (lambda x: x.masked_select(x[:, :, :1] > 0), 40, "select everything"),
        (lambda x: x[:, :3][(x[:, :3, 0] > 0).nonzero(as_tuple=True)], 24, "select everything"),
        (lambda x: x.detach().unique() * x.sum(), 40, "unique"),
        (lambda x: x * x.sum().item(), 40, "assumed to be 1"),
        (lambda x: x.tanh()[:, : (x.long().flatten() % 3).bincount(minlength=3).shape[0]], 24, None),
    ],
    ids=["mask", "masked_select", "nonzero", "unique", "item", "bincount"],
)
def test_bounds_are_stated(then: Callable[[Tensor], Tensor], elements: int, note: str | None) -> None:
    sizes = []

    def seen(x: Tensor) -> Tensor:
        out = then(x)
        sizes.append(out.numel() / x.shape[0])
        return out

    graph = traced(seen)
    assert set(sizes) == {elements}
    assert [note in one for one in graph.notes] == ([] if note is None else [True])
    assert all("`then`" not in one for one in graph.notes), "a function is no module"


def test_a_recomputed_mixture_is_traced() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixture(16, 32, 4, 2, "hit")

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return loss

    graph = trace_model(source(Recomputed, (8, 16)))
    flops = [getattr(call, way).matmul_flops(1) for way in ("forward", "backward") for call in graph.calls]
    forward = 8 * (2 * 16 * 16 + 2 * 16 * 4 + 2 * 2 * 2 * 16 * 32)
    assert sum(flops[: len(flops) // 2]) == forward
    # Again in backward, then twice as much but for the gradient of the input.
    assert sum(flops) == 4 * forward - 8 * 2 * 16 * 16


def adapted() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """Return a decoder of transformers with adapters of peft, moved as training scripts do."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    decoder = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model = get_peft_model(decoder, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).to("cpu").half().to("cuda")

    def inputs(batch: int) -> dict[str, Tensor]:
        tokens = torch.randint(32, (batch, 12)).to("cuda")
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return model, inputs


def test_decoders_of_transformers_do_without_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr("profiler.trace.trace.FakeCpu", refuse)
    graph = trace_model(source_of(adapted, "adapted", None, None), "bf16")
    assert graph.notes == ()
    trained = [one.name for operator in graph.operators for one in operator.parameters if one.trainable]
    assert len(trained) == 2 * 2
    assert all("lora_" in name for name in trained)


def test_numbers_that_torch_computes_do_without_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.trace.trace.FakeCpu", refuse)
    graph = traced(lambda x: x.view(-1, torch.div(10, 2, rounding_mode="trunc"), 8)[:, :4])  # type: ignore[call-overload]
    assert graph.calls[0].forward.matmul_flops == Affine(0, 5 * 2 * 8 * 8)


@pytest.mark.parametrize("style", ["hit", "counts"])
def test_models_that_want_to_see_a_real_device_get_the_same_answers(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = experts(style, 2, 1, 8)
    wanted = trace_model(model)
    assert bool(wanted.left_out) is (style == "hit")
    monkeypatch.setattr("profiler.trace.trace.MetaDevice", FakeCpu)
    got = trace_model(model)
    assert (got.notes, got.left_out) == (wanted.notes, wanted.left_out)
    for mine, other in zip(got.calls, wanted.calls, strict=True):
        assert (mine.saved_bytes, mine.forward.matmul_flops) == (other.saved_bytes, other.forward.matmul_flops)


# --- connectionist temporal classification ---------------------------------------------------------


@pytest.mark.parametrize("lengths", ["numbers", "tensors", "concatenated"])
def test_a_loss_of_alignments_holds_what_it_does_on_real_tensors(lengths: str) -> None:
    frames, labels = 24, 6

    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 32)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            """(batch, frames, 8), (batch, labels) -> a loss."""
            scores, batch = self.layer(x).log_softmax(-1).transpose(0, 1), len(x)
            sizes: Any = [frames] * batch, [labels] * batch
            if lengths != "numbers":
                sizes = torch.tensor(sizes[0]), (targets > 0).sum(1)
            return F.ctc_loss(scores, targets[targets > 0] if lengths == "concatenated" else targets, *sizes)

    def inputs(module: nn.Module, batch: int) -> Any:
        return (torch.randn(batch, frames, 8), torch.randint(1, 32, (batch, labels))), {}

    model = ModelSource("heard", Heard, inputs, 1)
    graph = trace_model(model)
    # By hand, of a sample: log-probabilities, and 2 x 6 + 1 states of each frame.
    assert graph.calls[-1].saved_bytes.per_sample >= 4 * frames * (32 + 2 * labels + 1)
    for traced, tracked in zip(predicted_peaks(graph, 32), tracked_peaks(model, 32), strict=True):
        assert tracked <= traced <= 1.1 * tracked
    plan = plan_of(graph, cluster(1, 2), {one.name: "shard" for one in graph.operators})
    assert compare(plan, model, graph, cluster(1, 2), with_data=False).error >= -0.002  # lengths are read there, too
