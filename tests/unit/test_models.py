"""The zoo's modules: sizes, arithmetic against independent references, and that they learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp.models.bert import Bert
from osdp.models.config import BertConfig, GPT2Config, LlamaConfig, UnevenConfig
from osdp.models.gpt2 import GPT2
from osdp.models.llama import Llama, rotary_angles, rotate
from osdp.models.uneven import Uneven
from osdp.zoo import load_model, model_card, model_names

TINY: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2(GPT2Config(97, 32, hidden_size=24, layers=2, heads=3)),
    "bert": lambda: Bert(BertConfig(97, 32, 24, layers=2, heads=3, token_types=2, intermediate_size=48)),
    "llama": lambda: Llama(LlamaConfig(97, 32, 32, 2, 4, 2, 48, rope_base=1e4, tied_head=False)),
    "llama tied": lambda: Llama(LlamaConfig(97, 32, 32, 2, 4, 4, 48, rope_base=1e4, tied_head=True)),
    "uneven": lambda: Uneven(UnevenConfig(97, 32, 8, (16, 24, 24), (32, 16))),
}
tiny = pytest.mark.parametrize("make", TINY.values(), ids=TINY.keys())


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def uneven_parameters() -> int:
    """Count from the shapes: norms 2w; attention q, kv, out; feed-forward 2 * 4ww + 5w; bridges."""
    encoder, decoder = (512, 640, 768, 1024, 768, 640), (768, 1024, 1280, 1024, 768, 512)
    memory, vocabulary, positions = 640, 32128, 512

    def layer(width: int, sources: tuple[int, ...]) -> int:
        attention = sum(width * width + width + 2 * width * (s + 1) + width * width + width for s in sources)
        return attention + 2 * width * (len(sources) + 1) + 8 * width * width + 5 * width

    total = sum(layer(w, (w,)) for w in encoder) + sum(layer(w, (w, memory)) for w in decoder)
    for widths in (encoder, decoder):
        total += (vocabulary + positions) * widths[0] + 2 * widths[-1]
        total += sum(a * b for a, b in pairwise(widths) if a != b)
    return total + vocabulary * decoder[-1]


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-tiny": 512 * 64 + 128 * 64 + 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64,
    "gpt2-mini": 2048 * 256 + 64 * 256 + 8 * (12 * 256 * 256 + 13 * 256) + 2 * 256,
    "bert-tiny": (260 + 128 + 2 + 2) * 64
    + 3 * (12 * 64 * 64 + 13 * 64)
    + (64 * 64 + 64)
    + (64 * 64 + 64 + 2 * 64 + 260)
    + (2 * 64 + 2),
    # Embeddings; 24 layers; pooler; token head (dense, norm, bias: its weight is tied); second head.
    "bert-large": (30522 + 512 + 2 + 2) * 1024
    + 24 * (4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024)
    + (1024 * 1024 + 1024)
    + (1024 * 1024 + 1024 + 2 * 1024 + 30522)
    + (2 * 1024 + 2),
    "llama-7b": 6_738_415_616,
    "llama-1b": 1_235_814_400,
    "uneven": uneven_parameters(),
}


def test_every_model_of_the_zoo_is_counted() -> None:
    assert sorted(PUBLISHED) == model_names()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_published(name: str) -> None:
    with torch.device("meta"):
        module = load_model(name).build()
    assert count(module) == PUBLISHED[name] == model_card(name).parameters


def test_bert_large_is_what_the_paper_calls_340_million() -> None:
    assert 335e6 < PUBLISHED["bert-large"] < 340e6


@pytest.mark.parametrize("name", sorted(PUBLISHED) if THOROUGH else ["bert-tiny", "gpt2-tiny", "llama-1b", "uneven"])
def test_a_step_runs_on_fake_tensors_without_memory(name: str) -> None:
    """One model of each family; all of them with --thorough."""
    source = load_model(name, sequence_length=16)
    with FakeTensorMode():
        module = source.build()
        args, kwargs = source.example_inputs(module, 2)
        assert args[0].shape == (2, 16)
        loss = module(*args, **kwargs)
        loss.backward()
        assert loss.shape == ()
        assert all(parameter.grad is not None for parameter in module.parameters())


@tiny
def test_loss_or_logits(make: Callable[[], nn.Module]) -> None:
    module = make()
    args, kwargs = module.example_inputs(3, 10)
    logits = module(*args)
    assert logits.shape == (3, 10, 97)
    loss = module(*args, **kwargs)
    assert loss.shape == ()
    parts = 2 if "next_sentence_labels" in kwargs else 1
    expected = math.log(97) + (math.log(2) if parts == 2 else 0.0)
    assert loss.item() == pytest.approx(expected, rel=0.03)  # untrained: as good as guessing
    assert module.example_inputs(1)[0][0].shape == (1, 32)  # as long as its positions


@tiny
def test_the_seed_decides_everything(make: Callable[[], nn.Module]) -> None:
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        module = make()
        args, kwargs = module.example_inputs(2, 8)
        losses.append(module(*args, **kwargs).item())
    assert losses[0] == losses[1] != losses[2]


@tiny
def test_training_reduces_the_loss(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    args, kwargs = module.example_inputs(2, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = module(*args, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@tiny
def test_bf16_keeps_an_fp32_loss(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    args, kwargs = module.example_inputs(2, 8)
    expected = module(*args, **kwargs)
    loss = module.bfloat16()(*args, **kwargs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)


@tiny
def test_every_parameter_is_filled_by_the_module_that_owns_it(make: Callable[[], nn.Module]) -> None:
    """So that a meta-device model can be materialised piece by piece."""
    torch.manual_seed(0)
    reference = make()
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                part.reset_parameters()
    assert count(module) == count(reference)
    for (name, got), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
        if expected.std() == 0 or got.numel() == 1:
            assert torch.equal(got, expected), name  # biases and norms
        else:
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.25), name


def test_gpt2_branches_that_add_to_the_residual_start_smaller() -> None:
    torch.manual_seed(0)
    module = GPT2(GPT2Config(97, 32, hidden_size=64, layers=8, heads=4))
    assert module.blocks[0].attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert module.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert module.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_heads_are_tied() -> None:
    for name in ("gpt2", "bert", "llama", "llama tied"):
        module = TINY[name]()
        shared = [n for n, _ in module.named_parameters(remove_duplicate=False)]
        assert len(shared) - len(list(module.parameters())) == (0 if name == "llama" else 1)


def plain_gpt2_logits(state: dict[str, Tensor], tokens: list[int], layers: int, heads: int) -> Tensor:
    """GPT-2 on one sequence in fp64, a position and a head at a time, from the paper's formulas."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = torch.stack([state["wte.weight"][t] + state["wpe.weight"][p] for p, t in enumerate(tokens)])
    width = x.shape[1]
    size = width // heads
    for layer in range(layers):
        at = f"blocks.{layer}"
        qkv = linear(norm(x, f"{at}.attention_norm"), f"{at}.attention.query_key_value")
        mixed = torch.zeros_like(x)
        for head in range(heads):
            q, k, v = (qkv[:, part * width + head * size :][:, :size] for part in range(3))
            for position in range(len(tokens)):
                scores = [math.exp(float(q[position] @ k[past]) / math.sqrt(size)) for past in range(position + 1)]
                for past, score in enumerate(scores):
                    mixed[position, head * size : (head + 1) * size] += score / sum(scores) * v[past]
        x = x + linear(mixed, f"{at}.attention.output")
        up = linear(norm(x, f"{at}.mlp_norm"), f"{at}.mlp.up")
        gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + linear(gelu, f"{at}.mlp.down")
    return norm(x, "norm") @ state["wte.weight"].T


@torch.no_grad()
def test_gpt2_equals_a_plain_implementation() -> None:
    torch.manual_seed(0)
    module = TINY["gpt2"]().double()
    for parameter in module.parameters():  # far from the start, so that each term shows
        parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(97, (2, 7))
    logits = module(tokens)
    for row in range(2):
        expected = plain_gpt2_logits(module.state_dict(), tokens[row].tolist(), layers=2, heads=3)
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)


def test_the_causal_loss_predicts_the_next_token() -> None:
    torch.manual_seed(0)
    module = TINY["gpt2"]().double()
    tokens = torch.randint(97, (2, 5))
    labels = tokens.clone()
    labels[1, 3] = -100
    logits = module(tokens)
    terms = [
        -torch.log_softmax(logits[row, position], -1)[tokens[row, position + 1]]
        for row in range(2)
        for position in range(4)
        if (row, position + 1) != (1, 3)
    ]
    expected = sum(terms) / len(terms)
    assert module(tokens, labels=labels).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_do_not_see_the_future(name: str) -> None:
    module = TINY[name]()
    tokens = torch.randint(97, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 97
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_bert_sees_both_ways_but_not_padding() -> None:
    module = TINY["bert"]()
    tokens = torch.randint(97, (1, 8))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 97
    assert not torch.allclose(module(tokens)[:, :6], module(changed)[:, :6])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    seen = [module(ids, attention_mask=mask)[:, :6] for ids in (tokens, changed)]
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(seen[0], module(tokens[:, :6]))


def test_bert_adds_the_losses_of_both_heads() -> None:
    module = TINY["bert"]()
    (tokens,), kwargs = module.example_inputs(2, 8)
    assert (kwargs["labels"] != -100).sum().item() == 4  # places 0 and 7 of two rows
    second = kwargs.pop("next_sentence_labels")
    alone = module(tokens, **kwargs)
    both = module(tokens, next_sentence_labels=second, **kwargs)
    assert (both - alone).item() == pytest.approx(math.log(2), rel=0.05)


def test_rotary_turns_pairs_by_hand() -> None:
    angles = rotary_angles(3, 4, base=100.0, device=torch.device("cpu"))
    torch.testing.assert_close(angles, torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 3, 4)
    turned = rotate(x, angles.cos(), angles.sin())[0, 0]
    for position in range(3):
        # The pairs are (x0, x2) = (1, 3) and (x1, x3) = (2, 4), as points of the complex plane.
        first = complex(1, 3) * complex(math.cos(position), math.sin(position))
        second = complex(2, 4) * complex(math.cos(position / 10), math.sin(position / 10))
        expected = torch.tensor([first.real, second.real, first.imag, second.imag])
        torch.testing.assert_close(turned[position], expected)


def test_rotary_attention_depends_on_distance_only() -> None:
    torch.manual_seed(0)
    angles = rotary_angles(12, 8, base=1e4, device=torch.device("cpu"))
    query, key = torch.randn(8), torch.randn(8)
    q = rotate(query.expand(1, 1, 12, 8), angles.cos(), angles.sin())[0, 0]
    k = rotate(key.expand(1, 1, 12, 8), angles.cos(), angles.sin())[0, 0]
    scores = q @ k.T
    torch.testing.assert_close(scores[5, 2], scores[11, 8])
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_grouped_queries_equal_full_heads_with_repeated_weights() -> None:
    torch.manual_seed(0)
    grouped = Llama(LlamaConfig(97, 32, 32, 1, 4, 2, 48, rope_base=1e4, tied_head=False))
    full = Llama(LlamaConfig(97, 32, 32, 1, 4, 4, 48, rope_base=1e4, tied_head=False))
    state = grouped.state_dict()
    for part in ("key", "value"):
        name = f"blocks.0.attention.{part}.weight"
        first, second = state[name].split(8)  # two heads of width 8
        state[name] = torch.cat([first, first, second, second])  # heads 0, 1 share the first
    full.load_state_dict(state)
    tokens = torch.randint(97, (2, 6))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_uneven_decodes_from_the_source_without_seeing_ahead() -> None:
    torch.manual_seed(0)
    module = TINY["uneven"]()
    source, target = torch.randint(97, (1, 6)), torch.randint(97, (1, 9))
    logits = module(source, decoder_input_ids=target)
    assert logits.shape == (1, 9, 97)
    other_target = target.clone()
    other_target[0, 4] = (other_target[0, 4] + 1) % 97
    after = module(source, decoder_input_ids=other_target)
    torch.testing.assert_close(logits[:, :4], after[:, :4])
    other_source = source.clone()
    other_source[0, 5] = (other_source[0, 5] + 1) % 97
    assert not torch.allclose(logits[:, 0], module(other_source, decoder_input_ids=target)[:, 0])


def test_uneven_trains_on_labels_moved_by_one() -> None:
    torch.manual_seed(0)
    module = TINY["uneven"]().double()
    source, labels = torch.randint(97, (1, 6)), torch.randint(97, (1, 4))
    moved = torch.tensor([[0, *labels[0, :3].tolist()]])
    logits = module(source, decoder_input_ids=moved)[0]
    expected = -torch.log_softmax(logits, -1)[range(4), labels[0]].mean()
    assert module(source, labels=labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_no_two_neighbours_of_uneven_are_equally_wide() -> None:
    widths = model_card("uneven").sizes()
    assert isinstance(widths, UnevenConfig)
    for row in (widths.encoder_widths, widths.decoder_widths):
        assert len(row) == 6
        assert all(a != b for a, b in pairwise(row))
    assert widths.encoder_widths != widths.decoder_widths


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2Config(97, 32, hidden_size=25, layers=2, heads=3),
        lambda: BertConfig(97, 32, 24, layers=2, heads=0, token_types=2, intermediate_size=48),
        lambda: LlamaConfig(97, 32, 32, 2, 4, 3, 48, rope_base=1e4, tied_head=False),
        lambda: LlamaConfig(97, 32, 12, 2, 4, 4, 48, rope_base=1e4, tied_head=False),
        lambda: UnevenConfig(97, 32, 8, (16, 20), (16,)),
        lambda: UnevenConfig(97, 32, 8, (), (16,)),
    ],
)
def test_sizes_that_do_not_divide_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"multiple|at least one width"):
        make()
