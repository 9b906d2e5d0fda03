"""Recorded and reset models against the ordinary constructor: same bits, same random state after."""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp.models.bert import Bert
from osdp.models.config import BertConfig, GPT2Config, LlamaConfig, UnevenConfig
from osdp.models.gpt2 import GPT2
from osdp.models.llama import Llama
from osdp.models.uneven import Uneven
from profiler.errors import OsdpError
from runtime.deferred_init.deferred_init import is_meta, record, reset

Build = Callable[[], nn.Module]
SEED = 11
PRETRAINED = torch.arange(12.0).view(3, 4)


class Model(nn.Module):
    """A module whose constructor is a function."""

    def __init__(self, fill: Callable[[Any], object]) -> None:
        super().__init__()
        fill(self)


def parameter(make: Callable[[], Tensor]) -> Build:
    """Return the factory of a model with one parameter."""
    return lambda: Model(lambda model: setattr(model, "weight", nn.Parameter(make())))


def initialised(initialise: Callable[..., object], *shape: int, **options: Any) -> Build:
    """Return the factory of a model with one parameter that a function of nn.init fills."""

    def make() -> Tensor:
        weight = nn.Parameter(torch.empty(shape))
        initialise(weight, **options)
        return weight

    return parameter(make)


def buffer(make: Callable[[], Tensor]) -> Build:
    """Return the factory of a model with one buffer."""
    return lambda: Model(lambda model: model.register_buffer("table", make()))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in chain(module.named_parameters(), module.named_buffers())}


def assert_constructed(build: Build, values: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
    """Assert that the values, made after the same seed, are those of the constructor, to the bit."""
    torch.manual_seed(SEED)
    wanted = named_tensors(build())
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    pairs = list(values())
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(name for name, _ in pairs) == sorted(wanted)
    for name, value in pairs:
        assert value.dtype == wanted[name].dtype, name
        assert torch.equal(value, wanted[name]), name


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False))
    model[2].weight = model[0].weight
    return model


def initialised_twice() -> nn.Module:
    """First each layer in its constructor, then all again, then some scaled."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            nn.init.zeros_(module.bias)

    model.apply(initialise)
    with torch.no_grad():
        model[2].weight.mul_(0.5)
        model[0].bias.copy_(model[2].weight[0])
    return model


def rotary(model: Any) -> None:
    angles = torch.outer(torch.arange(7.0), 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
    model.register_buffer("cosine", angles.cos(), persistent=False)
    model.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))


def seeds_by_hand(model: Any) -> None:
    """Use the default generator as a stream, jump in it, and use another one."""
    model.a = nn.Parameter(torch.randn(30))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.b = nn.Parameter(torch.randn(30))
    model.c = nn.Parameter(torch.randn(30))
    torch.manual_seed(SEED)
    model.d = nn.Parameter(torch.randn(40))
    state = torch.get_rng_state()
    model.e = nn.Parameter(torch.randn(40))
    torch.set_rng_state(state)
    model.f = nn.Parameter(torch.randn(20))
    generator = torch.Generator().manual_seed(3)
    model.g = nn.Parameter(torch.randn(3, generator=generator))
    model.h = nn.Parameter(torch.empty(5).normal_(generator=generator))
    torch.manual_seed(77)


def loads_a_checkpoint(model: Any) -> None:
    file = io.BytesIO()
    torch.save({"weight": PRETRAINED}, file)
    file.seek(0)
    model.weight = nn.Parameter(torch.empty(3, 4))
    nn.init.normal_(model.weight)
    model.load_state_dict(torch.load(file))


def wraps_constants(model: Any) -> None:
    table = torch.from_numpy(np.linspace(0, 1, 6, dtype=np.float32))
    table.mul_(2)
    model.table = nn.Parameter(table, requires_grad=False)
    model.alias = model.table
    model.weight = nn.Parameter(torch.zeros(3, 4))
    model.weight.data.copy_(PRETRAINED)
    model.assigned = nn.Parameter(torch.zeros(6))
    model.assigned.data = torch.from_numpy(np.ones(6, dtype=np.float32))


def works_on_the_cpu_by_name(model: Any) -> None:
    table = torch.zeros(4, device="cpu")
    table.cpu()[0] = 1  # on the CPU both are the tensor itself
    table.to("cpu")[1] = 2
    table.to(device=table.device)[2] = 3
    assert table.device.type == "cpu"
    assert not table.is_meta
    model.register_buffer("table", table)


def runs_layers(*layers: nn.Module) -> nn.Module:
    """Learn a width from what the layers return, as feature extractors do, and write their statistics so."""
    layer = nn.Sequential(*layers)
    with torch.no_grad():
        width = layer(torch.linspace(-1, 2, 150).reshape(2, 3, 5, 5)).shape[1]
    return nn.Sequential(layer, nn.Linear(width, 2))


def under_bfloat16(build: Build) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build()
    finally:
        torch.set_default_dtype(torch.float32)


ZOO: dict[str, Build] = {
    "gpt2": lambda: GPT2(GPT2Config(50, 16, 32, 2, 2)),
    "bert": lambda: Bert(BertConfig(50, 16, 32, 2, 2, 2, 64)),
    "llama": lambda: Llama(LlamaConfig(50, 16, 32, 2, 4, 2, 48, 1e4, True)),
    "uneven": lambda: Uneven(UnevenConfig(50, 16, 8, (16, 32), (16, 24))),
}
LAYERS: dict[str, Build] = {
    "linear": lambda: nn.Linear(30, 40),
    "embedding": lambda: nn.Embedding(30, 20, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm(5),
    "rms norm": lambda: nn.RMSNorm(5),
    "convolution": lambda: nn.Conv2d(3, 8, 3),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "attention of other widths": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=8, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "decoder layer": lambda: nn.TransformerDecoderLayer(32, 4, 64),
    "lstm": lambda: nn.LSTM(10, 20, 2),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 100, [20, 50]),
    "tied": tied,
}
RECORDED: dict[str, Build] = {
    "kaiming": initialised(nn.init.kaiming_uniform_, 30, 20, a=2.0),
    "xavier": initialised(nn.init.xavier_normal_, 30, 20),
    "truncated": initialised(nn.init.trunc_normal_, 30, 20, std=0.02),
    "truncated far": initialised(nn.init.trunc_normal_, 30, 20, a=2.0, b=3.0),
    "orthogonal": initialised(nn.init.orthogonal_, 30, 20),
    "orthogonal, wide": initialised(nn.init.orthogonal_, 20, 30),
    "eye": initialised(nn.init.eye_, 30, 20),
    "dirac": initialised(nn.init.dirac_, 6, 4, 3),
    "sparse": initialised(nn.init.sparse_, 30, 20, sparsity=0.3),
    "constant": initialised(nn.init.constant_, 30, 20, val=0.3),
    "legacy constructor": initialised(lambda weight: torch.Tensor(3, 4).fill_(1) + weight.data.fill_(2), 3, 4),
    "numbers": parameter(lambda: torch.tensor([1.0, 2.0]) * torch.tensor(3.0)),
    "random product": parameter(lambda: torch.randn(10, 4) * 0.1 @ torch.rand(4, 3)),
    "permutation": buffer(lambda: torch.randperm(9)),
    "causal mask": buffer(lambda: torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5)),
    "boolean index": buffer(lambda: torch.arange(5)[torch.tensor([True, False, True, True, False])]),
    "numbers looked at": parameter(lambda: torch.randn(3) * torch.linspace(0, 0.5, 4)[2].item()),
    "list looked at": parameter(lambda: torch.randn(3) * sum(torch.linspace(0, 0.5, 4).tolist())),
    "rotary": lambda: Model(rotary),
    "transposed": parameter(lambda: torch.randn(6, 4).t()),
    "half": lambda: nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)).to(torch.bfloat16),
    "double": lambda: nn.Linear(30, 40).double(),
    "default dtype": lambda: under_bfloat16(lambda: Model(lambda model: rotary(model) or setattr(model, "a", tied()))),
    "twice": initialised_twice,
    "clones": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "copied": lambda: nn.ModuleList(copy.deepcopy(layer) for layer in [nn.BatchNorm1d(4)] * 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    "frozen": lambda: nn.Linear(3, 4).requires_grad_(False),
    "seeds": lambda: Model(seeds_by_hand),
    "checkpoint": lambda: Model(loads_a_checkpoint),
    "constants": lambda: Model(wraps_constants),
    "cpu by name": lambda: Model(works_on_the_cpu_by_name),
    "runs layers": lambda: runs_layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()),
    "runs layers in evaluation": lambda: runs_layers(nn.Flatten(), nn.BatchNorm1d(75).eval(), nn.BatchNorm1d(75)),
    "runs instance norm": lambda: runs_layers(nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten()),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("build", (everything := ZOO | LAYERS | RECORDED).values(), ids=everything)
def test_a_recording_replays_the_constructor(build: Build) -> None:
    state = torch.get_rng_state()
    recording = record(build)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.is_meta for tensor in named_tensors(recording.module).values())
    for _ in range(2):  # a recording can be played again
        assert_constructed(build, recording.replay)


@pytest.mark.parametrize("build", (zoo_and_layers := ZOO | LAYERS).values(), ids=zoo_and_layers)
def test_reset_repeats_the_constructor(build: Build) -> None:
    with torch.device("meta"):
        module = build()
    before = dict(module.named_parameters(remove_duplicate=False))
    assert_constructed(build, lambda: reset(module))
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is tensor and tensor.is_meta for name, tensor in before.items())


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_a_factory_of_a_meta_model_is_reset(build: Build) -> None:
    def hollow() -> nn.Module:
        with torch.device("meta"):
            return build()

    assert_constructed(build, record(hollow).replay)


def test_the_recorded_module_is_the_model() -> None:
    module = record(tied).module
    assert module[2].weight is module[0].weight
    frozen = record(RECORDED["frozen"]).module
    assert not any(tensor.requires_grad for tensor in frozen.parameters())
    constants = record(RECORDED["constants"]).module
    assert constants.alias is constants.table
    assert not constants.table.requires_grad
    table = record(RECORDED["rotary"]).module.state_dict()
    assert list(table) == ["turn"]


def test_plain_attributes_have_their_values() -> None:
    module = record(lambda: Model(lambda model: setattr(model, "angles", torch.arange(5.0).cos()))).module
    assert torch.equal(module.angles, torch.arange(5.0).cos())


def test_tensors_in_plain_containers_have_their_values() -> None:
    def fill(model: Any) -> None:
        model.tokens = {"first": torch.arange(4).flip(0), "others": [torch.eye(2), (torch.ones(3), "name")]}
        model.part = nn.Linear(2, 2)
        model.part.tokens = model.tokens
        model.tied = [model.part.weight]

    module = record(lambda: Model(fill)).module
    wanted: Any = Model(fill)
    for found, value in zip(tree_leaves(module.tokens), tree_leaves(wanted.tokens), strict=True):
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value
    assert module.part.tokens is module.tokens
    assert module.tied[0] is module.part.weight


def test_uninitialised_memory_is_zero() -> None:
    values = dict(record(parameter(lambda: torch.empty(50))).replay())
    assert torch.equal(values["weight"], torch.zeros(50))


def test_what_skip_init_leaves_out_is_not_drawn() -> None:
    def build() -> nn.Module:
        skipped = nn.utils.skip_init(nn.Linear, 4, 4)
        nn.init.zeros_(skipped.weight)
        nn.init.zeros_(skipped.bias)
        return nn.Sequential(skipped, nn.Linear(4, 4))

    assert_constructed(build, record(build).replay)


class LiveBytes(TorchDispatchMode):
    """Follows the most bytes that tensors seen by ops held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._live[reference.cdata] = (reference, storage.nbytes())
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


@pytest.mark.parametrize("source", ["record", "reset"])
def test_few_layers_are_alive_at_a_time(source: str) -> None:
    """20 layers of 64 KiB: drawn, all drawn again, all scaled; at most the three in hand."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(20)))
        for module in model:
            nn.init.normal_(module.weight)
        with torch.no_grad():
            for module in model:
                module.weight /= 3
        return model

    if source == "record":
        values = record(build).replay()
    else:
        with torch.device("meta"):
            values = reset(build())
    taken = 0
    with LiveBytes() as live:
        for _, value in values:
            taken += value.numel()
    assert taken == 20 * 128 * 128
    assert 128 * 128 * 4 <= live.peak <= 3 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: torch.zeros(int(torch.rand(1).item() * 10)), "_local_scalar_dense"),
        (lambda: torch.randn(9)[torch.randn(9) > 0], "index"),
        (lambda: torch.tensor(torch.randn(3).tolist()), "tolist"),
        (lambda: torch.from_numpy(torch.randn(3).numpy()), "numpy"),
        (lambda: torch.geqrf(torch.ones(3, 3))[0], "geqrf"),
    ],
    ids=["item", "mask", "list", "numpy", "no meta kernel"],
)
def test_what_cannot_be_recorded_is_refused_by_name_and_line(make: Callable[[], Tensor], op: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(OsdpError, match=rf"{op}.*test_materialise\.py:{make.__code__.co_firstlineno},"):
        record(parameter(make))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.zeros(3).device.type == "cpu"


def test_an_error_of_the_factory_stays_its_own() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        record(parameter(lambda: torch.randn(3) + torch.randn(4)))
    assert not isinstance(caught.value, OsdpError)


def test_meta_tensors_from_outside_are_refused() -> None:
    outside = torch.empty(3, device="meta")
    with pytest.raises(OsdpError, match="which has no data"):
        record(lambda: nn.Sequential(nn.Linear(3, 3), parameter(lambda: outside)()))
    with pytest.raises(OsdpError, match="which has no data"):
        record(parameter(lambda: torch.ones(3) + outside))


def test_random_plain_attributes_are_refused() -> None:
    with pytest.raises(OsdpError, match="noise is a random tensor"):
        record(lambda: Model(lambda model: setattr(model, "noise", torch.randn(5))))
    with pytest.raises(OsdpError, match="noise holds a random tensor"):
        record(lambda: Model(lambda model: setattr(model, "noise", {"first": [torch.randn(5)]})))


def test_reset_names_what_nothing_fills() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), parameter(lambda: torch.ones(3))())
    with pytest.raises(OsdpError, match=r"nothing fills 1\.weight[\s\S]*got: a Model without"):
        reset(model)


def test_a_parents_reset_reaches_its_childrens_tensors() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.uniform_(self.scale)
            self.child.bias.data.fill_(7)

    with torch.device("meta"):
        module = Parent()
    assert_constructed(Parent, lambda: reset(module))


def test_is_meta() -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    assert is_meta(meta)
    assert not is_meta(nn.Linear(3, 3))
    with pytest.raises(OsdpError, match=r"0\.weight has no data, 1\.weight has"):
        is_meta(nn.Sequential(meta, nn.Linear(3, 3)))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("family", ["gpt2", "vit", "swin"])
def test_hugging_face_models(family: str) -> None:
    import transformers

    def build() -> nn.Module:
        if family == "gpt2":
            config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16)
            return transformers.AutoModelForCausalLM.from_config(config)
        if family == "vit":
            sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
            return transformers.ViTModel(transformers.ViTConfig(image_size=32, **sizes))
        config = transformers.SwinConfig(image_size=32, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
        return transformers.SwinModel(config)

    assert_constructed(build, record(build).replay)
