"""A model from a Hugging Face configuration file, with random weights and without any download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.models.config import check_length
from profiler.errors import OsdpError, install_advice
from profiler.model_source import Inputs, ModelSource
from profiler.yaml_files import read_text

if TYPE_CHECKING:
    from torch import nn

DEFAULT_LENGTH = 1024
"""Tokens per sample where the user gives no number, or fewer where the model has fewer."""

_HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


def load_hf(spec: str, sequence_length: int | None) -> ModelSource:
    """Return the language model of `hf:path/to/config.json`, fed with random tokens and labels; raises OsdpError."""
    try:
        import transformers
    except ImportError:
        raise OsdpError(f"{spec} needs the package transformers", advice=install_advice("hf")) from None
    config = _read_config(transformers, Path(spec.removeprefix("hf:")))
    auto_class = getattr(transformers, _auto_class_name(config))
    maximum = getattr(config, "max_position_embeddings", None)
    length = sequence_length or min(DEFAULT_LENGTH, maximum or DEFAULT_LENGTH)
    check_length(spec, length, maximum)

    def build() -> nn.Module:
        try:
            module: nn.Module = auto_class.from_config(config, trust_remote_code=False)
        except Exception as error:
            what = f"transformers cannot build {spec} as {auto_class.__name__}"
            raise OsdpError(what, got=f"{type(error).__name__}: {error}"[:400]) from error
        return module

    def example_inputs(module: nn.Module, micro_batch: int) -> Inputs:
        import torch

        device = next(module.parameters()).device
        tokens = torch.randint(config.vocab_size, (micro_batch, length), device=device)
        return (), {"input_ids": tokens, "labels": tokens.clone()}

    return ModelSource(spec, build, example_inputs, length)


def _read_config(transformers: Any, path: Path) -> Any:
    """Return transformers' config object for the JSON file at `path`."""
    read_text(path)  # for our message if it cannot be read; transformers would look for it on a server
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"[:400]
        expected = "the config.json of a model that transformers knows"
        raise OsdpError(f"{path} is not a configuration that transformers reads", got=got, expected=expected) from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        expected = "a language model, with vocab_size in its configuration"
        raise OsdpError(f"{path} describes no text model", got=type(config).__name__, expected=expected)
    config.use_cache = False  # a cache of keys and values is for generation
    return config


def _auto_class_name(config: Any) -> str:
    """Return the transformers class that builds the architecture in `config` with its head."""
    heads = (_HEADS[ending] for name in config.architectures or () for ending in _HEADS if name.endswith(ending))
    return next(heads, "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM")
