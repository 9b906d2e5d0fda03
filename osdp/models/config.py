"""Sizes of the zoo's models, and which module each family builds. Nothing here needs torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from profiler.bounds import Layers, Size, Tokens
from profiler.errors import OsdpError

STRICT = {"extra": "forbid"}


def _divides(small: int, large: int, what: str) -> None:
    if small < 1 or large < 1 or large % small:
        raise ValueError(f"{what}: {large} is not a positive multiple of {small}")


@dataclass(frozen=True)
class _Sizes:
    """Sizes that every family has."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    vocabulary_size: Size
    maximum_positions: Tokens
    """Longest sequence; Llama's rotary embedding itself has no limit."""


@dataclass(frozen=True)
class _StackSizes(_Sizes):
    """Sizes of a stack of equal layers."""

    hidden_size: Size
    """Width of the residual stream."""
    layers: Layers
    heads: Size
    """Attention heads, of queries where keys have fewer; divides `hidden_size`."""

    def __post_init__(self) -> None:
        _divides(self.heads, self.hidden_size, "hidden_size and heads")


@dataclass(frozen=True)
class GPT2Config(_StackSizes):
    """Sizes of a GPT-2."""

    dropout: float = 0.0
    """Probability, after the embedding, in attention and on both residual branches."""


@dataclass(frozen=True)
class BertConfig(_StackSizes):
    """Sizes of a BERT."""

    token_types: Size
    """Rows of the segment embedding."""
    intermediate_size: Size
    """Width inside the feed-forward network."""
    dropout: float = 0.0
    """Probability, after the embedding, in attention and on both residual branches."""


@dataclass(frozen=True)
class LlamaConfig(_StackSizes):
    """Sizes of a Llama."""

    key_value_heads: Size
    """Key and value heads; divides `heads`."""
    intermediate_size: Size
    """Width inside the feed-forward network."""
    rope_base: float
    """Base of the rotary wavelengths."""
    tied_head: bool
    """Whether the head is the token embedding."""
    epsilon: float = 1e-5
    """Added to the mean square in normalisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _divides(self.key_value_heads, self.heads, "heads and key_value_heads")
        _divides(2, self.hidden_size // self.heads, "a head's width, for rotary embedding")


@dataclass(frozen=True)
class UnevenConfig(_Sizes):
    """Sizes of an encoder-decoder whose layers differ in width."""

    head_size: Size
    """Width of one attention head; divides every width."""
    encoder_widths: tuple[Size, ...]
    decoder_widths: tuple[Size, ...]
    expansion: Size = 4
    """Inner width of a feed-forward network over its outer width."""

    def __post_init__(self) -> None:
        if not self.encoder_widths or not self.decoder_widths:
            raise ValueError("encoder_widths and decoder_widths must hold at least one width each")
        for width in (*self.encoder_widths, *self.decoder_widths):
            _divides(self.head_size, width, "every width and head_size")


ModelConfig = GPT2Config | BertConfig | LlamaConfig | UnevenConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model: its sizes and its module."""

    config: type[ModelConfig]
    module: str
    """`package.module:Class`, imported only when a model is built, because it needs torch."""


FAMILIES = {
    "gpt2": Family(GPT2Config, "osdp.models.gpt2:GPT2"),
    "bert": Family(BertConfig, "osdp.models.bert:Bert"),
    "llama": Family(LlamaConfig, "osdp.models.llama:Llama"),
    "uneven": Family(UnevenConfig, "osdp.models.uneven:Uneven"),
}


def check_length(spec: str, sequence_length: int, maximum: int | None) -> None:
    """Raise OsdpError for a sequence longer than `maximum`, the positions that `spec` has (if limited)."""
    if maximum is not None and sequence_length > maximum:
        what = f"{spec} cannot take sequences this long"
        advice = "choose a shorter sequence, or a configuration with more positions"
        raise OsdpError(what, got=f"{sequence_length} tokens", expected=f"at most {maximum}", advice=advice)
