"""A model from a Hugging Face configuration file, with random weights and without any download.

The class is the one that the configuration names under `architectures`; `huggingface_inputs` says what to feed it.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from osdp.models.huggingface_inputs import FACTORY, find, find_inputs, nested
from profiler.errors import OsdpError, install_advice
from profiler.model_source import ModelSource
from profiler.yaml_files import read_text

if TYPE_CHECKING:
    from torch import nn

_AUTO_CLASSES = (
    "ForSeq2SeqLM",
    "ForSpeechSeq2Seq",
    "ForMaskedLM",
    "ForImageTextToText",
    "ForCausalLM",
    "ForZeroShotImageClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "",
)
"""Ends of the names of auto classes, in the order in which they are asked where the configuration names no class."""


def load_hf(spec: str, sequence_length: int | None) -> ModelSource:
    """Return the model of `hf:path/to/config.json`, fed with random inputs and labels; raises OsdpError."""
    transformers = _import(spec)
    config, notes = _read_config(transformers, Path(spec.removeprefix("hf:")))
    model_class, chosen = _model_class(spec, transformers, config)
    if not isinstance(config, model_class.config_class or object):
        config = config.get_text_config()  # the text model of a configuration for text and images
    if find(config, "pad_token_id") is None and model_class.__name__.endswith("ForSequenceClassification"):
        config.get_text_config().pad_token_id = 0  # it looks for the last token that is none
    inputs, assumed = find_inputs(spec, model_class, config, sequence_length)

    def build() -> nn.Module:
        try:
            module: nn.Module = model_class._from_config(config)
        except Exception as error:
            what = f"transformers cannot build {spec} as {model_class.__name__}"
            raise OsdpError(what, got=_shown(error), advice=FACTORY) from error
        return module

    return ModelSource(spec, build, inputs, inputs.length, (*notes, *chosen, *assumed), FACTORY)


def _import(spec: str) -> Any:
    """Return the package transformers, silenced unless the environment says otherwise; raises OsdpError."""
    try:
        import transformers
        from transformers import PreTrainedModel  # noqa: F401  # the package imports its parts late
    except ImportError as error:
        if isinstance(sys.modules.get("transformers"), ModuleType):
            what = "the package transformers is installed and cannot be imported"
            raise OsdpError(what, got=_shown(error.__cause__ or error)) from error
        raise OsdpError(f"{spec} needs the package transformers", advice=install_advice("hf")) from None
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # checks of values, which a trace does not have
    return transformers


def _read_config(transformers: Any, path: Path) -> tuple[Any, list[str]]:
    """Return transformers' config object for the JSON file at `path`, and notes on what of it is ignored.

    As in `from_pretrained`, a folder stands for the config.json in it.
    """
    if path.is_dir():
        path, folder = path / "config.json", path
        if not path.exists():
            raise OsdpError(
                f"there is no config.json in {folder}", expected="the folder of a model, or its config.json"
            )
    read_text(path)  # for our message if it cannot be read; transformers would look for it on a server
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        expected = f"the config.json of a model that transformers {transformers.__version__} knows"
        what = f"{path} is not a configuration that transformers reads"
        raise OsdpError(what, got=_shown(error), expected=expected, advice=FACTORY) from error
    notes = []
    if getattr(config, "quantization_config", None) is not None:
        notes.append("quantization_config is ignored: the weights have the precision of the plan")
    for part in nested(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False  # a cache of keys and values is for generation
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(part, name, 0):
                setattr(part, name, 0.0)  # ranks that drop different layers would wait for each other
                notes.append(f"{name} is ignored: every rank runs every layer")
    if getattr(config, "is_encoder_decoder", False) and find(config, "decoder_start_token_id") is None:
        config.decoder_start_token_id = find(config, "bos_token_id", "pad_token_id", default=0)
    return config, notes


def _model_class(spec: str, transformers: Any, config: Any) -> tuple[Any, list[str]]:
    """Return the class that the configuration names, or one that fits it and a note that says so."""
    named = config.architectures or []
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found, []
    if named:
        near = get_close_matches(named[0], dir(transformers), n=1, cutoff=0.8)
        expected = f"a model class of transformers {transformers.__version__}; no other code is loaded"
        advice = f"did you mean {near[0]}? Otherwise: {FACTORY}" if near else FACTORY
        raise OsdpError(f"{spec} names an unknown architecture", got=named[0], expected=expected, advice=advice)
    for kind in _AUTO_CLASSES:
        mapping = getattr(transformers, f"AutoModel{kind}")._model_mapping
        if type(config) in mapping:
            fits = mapping[type(config)]
            chosen = fits[0] if isinstance(fits, tuple) else fits
            return chosen, [f"the configuration names no architecture; {chosen.__name__} is planned"]
    raise OsdpError(f"{spec} names no architecture", got=type(config).__name__, advice=f"add it, or {FACTORY}")


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
