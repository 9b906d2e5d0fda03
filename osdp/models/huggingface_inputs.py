"""What to feed a model of transformers: random arguments of its forward, sized by its configuration.

Arguments are recognised by their names, which mean the same in all of transformers, and labels by the name of the head.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from osdp.models.config import check_length
from profiler.errors import OsdpError
from profiler.model_source import Inputs

FACTORY = "write a factory that builds and feeds it, and give --model package.module:function (docs/planning.md)"
DEFAULT_LENGTH = 1024
"""Tokens per sample (or frames of sound) where the user gives no number, or fewer where the model has fewer."""
IMAGE_SIZE = 224
"""Height and width of an image where the configuration gives none."""
CHOICES = 2
"""Answers per sample of a multiple-choice model."""
_SIZES = {
    "input_ids": ("vocab_size",),
    "pixel_values": (),
    "input_values": ("conv_kernel", "max_length"),
    "input_features": ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"),
}
"""What a model computes from, and the entries of a configuration of which one says how large that is."""
_LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label", "sentence_order_label", "return_loss")
_UNLABELLED = ("Detection", "InstanceSegmentation", "UniversalSegmentation", "ImageSegmentation")
"""Ends of the names of heads whose labels are no tensors of one size."""
_CLASSES = ("Classification", "SemanticSegmentation", "XVector")
"""Of heads whose labels are classes, where the model has no vocabulary."""
_POSITIONS = ("max_position_embeddings", "max_target_positions")
_IMAGE_TOKEN = ("image_token_id", "image_token_index")
_IMAGE_LAYOUT = {"image_grid_thw", "pixel_attention_mask", "aspect_ratio_ids", "image_position_ids"}
"""Arguments of models that cut an image into a number of parts of their own."""


def nested(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it: of the text, of the images, of an encoder, of a decoder."""
    yield config
    for part in vars(config).values():
        if isinstance(getattr(part, "model_type", None), str):
            yield from nested(part)


def find(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these entries that the configuration has, or else one nested in it."""
    found = (getattr(part, name, None) for name in names for part in nested(config))
    return next((value for value in found if value is not None), default)


@dataclass(frozen=True)
class HuggingFaceInputs:
    """Makes the arguments of one forward: the `example_inputs` of a `ModelSource`."""

    config: Any
    """Configuration of transformers."""
    head: str
    """Name of the class, which says what its labels are."""
    length: int
    """Tokens per sample; frames where it takes sound alone; 1 where it takes images alone."""
    names: tuple[str, ...]
    """Arguments that are fed."""
    writes: bool = False
    """Whether a decoder writes what it answers."""

    def __call__(self, module: nn.Module, micro_batch: int) -> Inputs:
        """Return random inputs and labels on the module's device."""
        with next(module.parameters()).device:
            return (), {name: self._make(name, micro_batch) for name in self.names}

    def _make(self, name: str, batch: int) -> Any:
        match name:
            case "input_ids":
                return self._tokens(batch, "encoder")
            case "decoder_input_ids":
                return self._tokens(batch, "decoder")
            case "pixel_values":
                return self._images(batch)
            case "input_values":
                return self._sound(batch)
            case "input_features":
                return self._spectrum(batch)
            case "bool_masked_pos":
                return (torch.arange(_patches(self.config)) % 2 == 0).expand(batch, -1)
            case "token_type_ids":
                return (torch.arange(self.length) < _image_tokens(self.config)).long().expand(batch, -1)
            case "labels":
                return self._labels(batch)
            case "start_positions" | "end_positions":
                return torch.randint(self.length, (batch,))
            case "next_sentence_label" | "sentence_order_label":
                return torch.randint(2, (batch,))
        return True  # return_loss

    def _tokens(self, batch: int, side: str) -> Tensor:
        """Return (batch, length) ordinary tokens; first, those that stand for an image; last, the end of the text."""
        config = getattr(self.config, side, None)
        config = config if hasattr(config, "model_type") else self.config
        vocabulary = find(config, "vocab_size")
        entries = [entry for part in nested(self.config) for entry in vars(part).items()]
        special = {value for name, value in entries if name.endswith(("_token_id", "_token_index"))}
        bounds = sorted({-1, vocabulary, *(n for n in special if isinstance(n, int) and 0 <= n < vocabulary)})
        low, high = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
        choices = (CHOICES,) if self.head.endswith("MultipleChoice") else ()
        tokens = torch.randint(low + 1, high, (batch, *choices, self.length))
        end, image = find(config, "eos_token_id"), find(self.config, *_IMAGE_TOKEN)
        if isinstance(end, int) and 0 <= end < vocabulary:
            tokens[..., -1] = end
        if image is not None and "pixel_values" in self.names:
            tokens[..., : _image_tokens(self.config)] = image
        return tokens

    def _images(self, batch: int) -> Tensor:
        """Return (batch, channels, height, width) images, or (batch, frames, channels, height, width) videos."""
        frames, channels = find(self.config, "num_frames"), find(self.config, "num_channels", "in_channels", default=3)
        return torch.randn(batch, *(() if frames is None else (frames,)), channels, *_image_size(self.config))

    def _sound(self, batch: int) -> Tensor:
        """Return (batch, samples) of which convolutions make `length` frames, or (batch, frames, mel bins)."""
        kernels, strides = find(self.config, "conv_kernel"), find(self.config, "conv_stride")
        if kernels is None:
            return torch.randn(batch, find(self.config, "max_length"), find(self.config, "num_mel_bins"))
        samples = self.length
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return torch.randn(batch, samples)

    def _spectrum(self, batch: int) -> Tensor:
        """Return (batch, mel bins, frames), or (batch, length, features) where the number of frames is free."""
        bins, positions = find(self.config, "num_mel_bins"), find(self.config, "max_source_positions")
        if bins is not None and positions is not None:
            return torch.randn(batch, bins, 2 * positions)
        return torch.randn(batch, self.length, find(self.config, *reversed(_SIZES["input_features"])))

    def _labels(self, batch: int) -> Tensor:
        """Return labels of the form that the head takes."""
        classes, problem = find(self.config, "num_labels"), find(self.config, "problem_type")
        if self.head.endswith("TokenClassification"):
            return torch.randint(classes, (batch, self.length))
        if self.head.endswith("FrameClassification"):
            return torch.randint(2, (batch, self.length, classes))
        if self.head.endswith("SemanticSegmentation"):
            return torch.randint(classes, (batch, *_image_size(self.config)))
        if self.head.endswith("MultipleChoice"):
            return torch.randint(CHOICES, (batch,))
        if self.head.endswith("QuestionAnswering") and not self.writes:  # about an image: a score for every answer
            return torch.rand(batch, classes)
        if self.head.endswith(("Classification", "XVector", "NextSentencePrediction")):
            if problem == "multi_label_classification" or (problem == "regression" and classes > 1):
                return torch.rand(batch, classes)
            regression = problem == "regression" or (problem is None and classes == 1)
            return torch.rand(batch) if regression else torch.randint(classes, (batch,))
        tokens = self._tokens(batch, "decoder")
        return tokens[:, : max(1, self.length // 2)] if self.head.endswith("CTC") else tokens  # fewer than frames


def find_inputs(
    spec: str, model_class: Any, config: Any, sequence_length: int | None
) -> tuple[HuggingFaceInputs, list[str]]:
    """Return what makes the arguments of a model's forward, and notes on what was assumed; raises OsdpError."""
    parameters = [p for p in inspect.signature(model_class.forward).parameters.values() if p.name != "self"]
    takes = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    head, notes = model_class.__name__, []
    fed = [name for name, entries in _SIZES.items() if name in takes and (not entries or find(config, *entries))]
    if "input_ids" in fed and find(config, *_IMAGE_TOKEN) is not None:
        if "pixel_values" in fed and (_IMAGE_LAYOUT & takes.keys() or find(config, "image_grid_pinpoints")):
            fed.remove("pixel_values")
            notes.append("fed with text alone, as every sample's images are cut in another way")
        fed += [name for name in ("token_type_ids",) if name in takes]
    for name in ("input_values", "input_features"):
        if "input_ids" in fed and name in fed and not takes[name]:
            fed.remove(name)
            notes.append("fed with text alone, as where its sound belongs in the text is not known")
    main = model_class.main_input_name
    needed = [name for name, required in takes.items() if required or name == main]
    unknown = [name for name in needed if name not in fed]
    if unknown or not fed:
        lacking = {
            name: f" (without {' or '.join(keys)} in the configuration)" for name, keys in _SIZES.items() if keys
        }
        got = f"the forward of {head} takes " + ", ".join(name + lacking.get(name, "") for name in unknown or takes)
        expected = f"{', '.join(_SIZES)}, and their sizes in the configuration"
        raise OsdpError(f"what {spec} is to be fed with is not known", got=got, expected=expected, advice=FACTORY)
    if "labels" not in takes and "decoder_input_ids" in takes:
        fed.append("decoder_input_ids")
    if head.endswith("MaskedImageModeling"):
        fed.append("bool_masked_pos")
    has_tokens = find(config, "vocab_size") is not None and not head.endswith(_UNLABELLED)
    fed += [name for name in _LABELS if name in takes and (has_tokens or head.endswith(_CLASSES))]
    has_text = "pixel_values" not in fed or has_tokens
    if sequence_length is not None and not has_text:
        notes.append(f"the sequence length {sequence_length} has no effect, as samples have none")
    length = _length(spec, config, sequence_length, has_text=has_text)
    if {"input_ids", "pixel_values"} <= {*fed} and find(config, *_IMAGE_TOKEN) and length <= _image_tokens(config):
        expected = f"more than {_image_tokens(config)}, the tokens of an image"
        raise OsdpError(f"the samples of {spec} are too short for an image", got=f"{length} tokens", expected=expected)
    return HuggingFaceInputs(config, head, length, tuple(fed), "decoder_input_ids" in takes), notes


def _length(spec: str, config: Any, asked: int | None, *, has_text: bool) -> int:
    """Return the tokens or frames per sample; raises OsdpError if those asked for are too many or too few."""
    if not has_text:
        return 1
    limits = [getattr(part, name, None) for part in nested(config) for name in _POSITIONS]
    maximum = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    first = (find(config, "pad_token_id") or 0) + 1
    if maximum is not None and maximum % 64 == first:
        maximum -= first  # RoBERTa and its kin number positions from padding_idx + 1: 514 are for 512 tokens
    length = asked or min(DEFAULT_LENGTH, maximum or DEFAULT_LENGTH)
    check_length(spec, length, maximum)
    return length


def _image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of an image in pixels."""
    return _pair(find(config, "image_size", default=IMAGE_SIZE))


def _patches(config: Any) -> int:
    """Return the number of patches of an image."""
    (height, width), (rows, columns) = _image_size(config), _pair(find(config, "patch_size", default=1))
    return (height // rows) * (width // columns)


def _image_tokens(config: Any) -> int:
    """Return the number of tokens that stand for an image in a text."""
    stated: int | None = find(config, "image_seq_length", "mm_tokens_per_image", "num_image_tokens")
    return _patches(config) if stated is None else stated


def _pair(size: Any) -> tuple[int, int]:
    return (size[0], size[1]) if isinstance(size, tuple | list) else (size, size)
