"""Small models as people have them: of transformers, with adapters of peft, and of the layers that torch has."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from huggingface_cases import CASES, length_of, write
from torch import Tensor, nn

from osdp.models.huggingface_inputs import nested
from osdp.zoo import load_model
from profiler.model_source import ModelSource

WIDTH, LENGTH, TOKENS = 16, 6, 29
DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# --- of transformers and peft -----------------------------------------------------------------


def hugging_face(architecture: str, **changes: Any) -> ModelSource:
    """Return a tiny model of transformers, without dropout and masked sound."""
    model_type, sizes = CASES[architecture]
    folder = Path(tempfile.mkdtemp())
    spec = write(folder, architecture, model_type, {**sizes, **changes})
    source = load_model(spec, sequence_length=length_of(architecture))
    for part in nested(source.example_inputs.config):  # type: ignore[attr-defined]
        for name, value in vars(part).items():
            if ("drop" in name and isinstance(value, float)) or name == "apply_spec_augment":
                setattr(part, name, type(value)(0))
    return source


def with_adapters(architecture: str, dtype: torch.dtype, **options: Any) -> ModelSource:
    """Return a model of transformers that is frozen, with trained adapters of peft in fp32."""
    from peft import LoraConfig, get_peft_model

    base = hugging_face(architecture)

    def build() -> nn.Module:
        adapters = LoraConfig(r=4, init_lora_weights=False, **options)
        return get_peft_model(base.build().to(dtype), adapters)  # type: ignore[arg-type]

    return ModelSource(f"lora-{architecture}", build, base.example_inputs, base.sequence_length)


def with_frozen_backbone(architecture: str) -> ModelSource:
    """Return a model of transformers of which the head alone is trained."""
    base = hugging_face(architecture)

    def build() -> nn.Module:
        model: Any = base.build()
        model.base_model.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    return ModelSource(f"frozen-{architecture}", build, base.example_inputs, base.sequence_length)


def detection() -> ModelSource:
    """Return a detector with queries, whose loss is of the queries in order: a matching depends on data."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    stem = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = DetrConfig(
                backbone_config=stem, d_model=16, num_queries=5, num_labels=3, dropout=0.0, **sizes, **heads
            )
            self.model = DetrForObjectDetection(config)

        def forward(self, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
            """(batch, 3, height, width), (batch, queries), (batch, queries, 4) -> a loss."""
            found = self.model(pixel_values=images)
            return F.cross_entropy(found.logits.flatten(0, 1), classes.flatten()) + F.l1_loss(found.pred_boxes, boxes)

    return source_of(Detector, lambda b: (torch.randn(b, 3, 64, 64), torch.randint(4, (b, 5)), torch.rand(b, 5, 4)))


# --- of torch ---------------------------------------------------------------------------------


class Translator(nn.Module):
    """`nn.Transformer` between embeddings of which the target's is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.target.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) twice -> a loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


class Attentive(nn.Module):
    """`nn.MultiheadAttention` in its forms: of one input, of several widths, with biases for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=12, add_bias_kv=True, add_zero_attn=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, classes: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH), (batch, LENGTH, 8), (batch, LENGTH, 12), (batch,) -> a loss."""
        x = x + self.own(x, x, x, need_weights=False)[0]
        y, weights = self.other(x.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1))
        return F.cross_entropy(self.head(self.norm(y).mean(0)), classes) + weights.square().mean()


class Recurrent(nn.Module):
    """A language model of an LSTM with projections, a GRU in both directions, and cells."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 12, num_layers=2, proj_size=8, batch_first=True)
        self.gru = nn.GRU(8, WIDTH // 2, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) -> a loss."""
        x, _ = self.gru(self.lstm(self.embed(tokens))[0])
        hidden, state = [], None
        for step in x.unbind(1):
            state = self.cell(step, state)
            hidden.append(state[0])
        return F.cross_entropy(self.head(torch.stack(hidden, 1)).flatten(0, 1), tokens.flatten())


class Unet(nn.Module):
    """Convolutions down and up again, with every kind of normalisation, and a skip over the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.PReLU(8))
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, stride=2), nn.InstanceNorm2d(8, affine=True))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 8, 8) -> a loss."""
        x = self.down(images)
        return F.mse_loss(self.head(self.up(torch.cat([x, self.middle(x)], 1))), images)


class ManyDtypes(nn.Module):
    """A parameter without dimensions, and layers in bf16, fp32 and fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in DTYPES)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return (x * self.temperature.to(x.dtype)).square().mean()


def source_of(build: Callable[[], nn.Module], inputs: Callable[[int], tuple[Any, ...]]) -> ModelSource:
    """Return a model and its inputs."""
    return ModelSource(getattr(build, "__name__", "model"), build, lambda module, batch: (inputs(batch), {}), 1)


def tokens(batch: int) -> Tensor:
    """Return (batch, LENGTH) tokens."""
    return torch.randint(TOKENS, (batch, LENGTH))


def attended(batch: int) -> tuple[Tensor, ...]:
    """Return the arguments of `Attentive`."""
    return *(torch.randn(batch, LENGTH, width) for width in (WIDTH, 8, 12)), torch.randint(3, (batch,))


ALIKE = ("T5Model", "GPT2ForSequence", "BertForPre", "BertForM", "BertForN", "BertForQ", "Marian", "ViTForMasked")
"""Configurations whose bodies others have too; the first has no loss."""
MODELS: dict[str, Callable[[], ModelSource]] = {
    **{name: partial(hugging_face, name) for name in CASES if not name.startswith(ALIKE)},
    **{
        f"{name}, grouped_mm": partial(hugging_face, name, experts_implementation="grouped_mm")
        for name in CASES
        if "experts_implementation" in CASES[name][1]
    },
    "Detr, without matching": detection,
    "LoRA on Llama": partial(with_adapters, "LlamaForCausalLM", torch.float32, target_modules="all-linear"),
    "LoRA on Llama in bf16": partial(with_adapters, "LlamaForCausalLM", torch.bfloat16, target_modules="all-linear"),
    "LoRA on T5": partial(
        with_adapters,
        "T5ForConditionalGeneration",
        torch.float32,
        target_modules=["q", "v"],
        modules_to_save=["lm_head"],
    ),
    "ViT, frozen but for its head": partial(with_frozen_backbone, "ViTForImageClassification"),
    "nn.Transformer": partial(source_of, Translator, lambda batch: (tokens(batch), tokens(batch))),
    "nn.MultiheadAttention": partial(source_of, Attentive, attended),
    "nn.LSTM, nn.GRU": partial(source_of, Recurrent, lambda batch: (tokens(batch),)),
    "convolutions, norms": partial(source_of, Unet, lambda batch: (torch.randn(batch, 3, 8, 8),)),
    "bf16, fp32, fp64, 0-d": partial(source_of, ManyDtypes, lambda batch: (torch.randn(batch, WIDTH),)),
}

SHALLOW = {
    "T5ForConditionalGeneration, shallow": partial(
        hugging_face, "T5ForConditionalGeneration", num_layers=2, num_decoder_layers=1
    )
}
"""Of `MODELS`, with a decoder of one layer: two layers that hand on their biases of positions are in the encoder."""


@cache
def model(name: str) -> ModelSource:
    """Return a model."""
    return {**MODELS, **SHALLOW}[name]()
