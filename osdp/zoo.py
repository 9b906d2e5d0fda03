"""Models by name.

spec                        what it is                              built by
gpt2-1.5b                   a model of the zoo (configs/models)     osdp.models
path/to/model.yaml          a file of the same form                 osdp.models
package.module:factory      your own function or class              osdp.models.user_factory
path/to/file.py:factory     the same                                osdp.models.user_factory
hf:path/to/config.json      a Hugging Face file, or its folder      osdp.models.huggingface
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from osdp.models.config import FAMILIES, STRICT, ModelConfig, check_length
from osdp.planning.clusters import cluster_names, load_cluster
from osdp.resources import resource_file, resource_names
from profiler.bounds import Bytes, Tokens
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.yaml_files import Problem, read_text, read_yaml, validate

__all__ = ["ModelCard", "cluster_names", "load_cluster", "load_model", "model_card", "model_contents", "model_names"]


@dataclass(frozen=True)
class ModelCard:
    """A model file: `configs/models/*.yaml` or the user's own."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT
    SCHEMA: ClassVar[str] = "osdp.model/1"

    schema: str
    name: str
    """Short name, as given to `--model`."""
    family: str
    """Key of `osdp.models.config.FAMILIES`."""
    description: str
    """One line for `osdp models`."""
    source: str
    """Where the sizes come from."""
    sequence_length: Tokens
    """Tokens per sample unless the user gives another number."""
    config: dict[str, Any]
    """Fields of the family's config."""
    parameters: Bytes | None = None
    """Number of parameters, tied ones once."""

    def sizes(self) -> ModelConfig:
        """Return `config` as the family's config, which `read_model_card` has checked."""
        sizes, problems = validate(self.config, FAMILIES[self.family].config)
        assert sizes is not None, problems
        return sizes


def model_names() -> list[str]:
    """Return the names of the zoo's models, sorted."""
    return resource_names("models")


def model_card(name: str) -> ModelCard:
    """Return what the zoo knows of the model `name`, without torch; raises OsdpError."""
    advice = "your own model: package.module:factory, path/to/model.yaml or hf:path/to/config.json"
    if name.endswith(".py"):
        advice = f"name a function in it: {name}:make_model"
    return read_model_card(resource_file("models", name, advice))


def read_model_card(path: Path) -> ModelCard:
    """Read a model file; raises OsdpError."""
    return read_yaml(path, ModelCard, schema=ModelCard.SCHEMA, check=_problems)


def load_model(spec: str, *, sequence_length: int | None = None) -> ModelSource:
    """Return the model that `spec` names (see the table above), fed with `sequence_length` tokens; raises OsdpError."""
    if sequence_length is not None and sequence_length < 1:
        raise OsdpError("the sequence length must be at least 1", got=str(sequence_length))
    if spec.startswith("hf:"):
        from osdp.models.huggingface import load_hf

        return load_hf(spec, sequence_length)
    if _is_code(spec):
        from osdp.models.user_factory import load_user_model

        return load_user_model(spec, sequence_length)
    return _source(spec, _card(spec), sequence_length)


def _is_code(spec: str) -> bool:
    """Whether `spec` names a factory of the user's, where it is no Hugging Face configuration."""
    return ":" in spec and not _is_card(spec)


def _is_card(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def _card(spec: str) -> ModelCard:
    """Return what a file says of a model, the user's or one of the zoo; raises OsdpError."""
    return read_model_card(Path(spec)) if _is_card(spec) else model_card(spec)


def model_contents(spec: str, sequence_length: int | None) -> str | None:
    """Return all that the model depends on which `spec` names, beside installed packages; None: that is not known,
    as of the user's own code.

    Needs no torch.  Raises OsdpError as `load_model` does, of what can be known without it.
    """
    if spec.startswith("hf:"):
        if not is_installed("transformers"):
            return None
        path = Path(spec.removeprefix("hf:"))
        return f"{read_text(path / 'config.json' if path.is_dir() else path)} {sequence_length}"
    if _is_code(spec):
        return None
    card = _card(spec)
    return f"{card.family} {card.sizes()!r} {sequence_length or card.sequence_length}"


def is_installed(package: str) -> bool:
    """Whether a package lies beside its metadata, by which its version is known, and not where it is worked on."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return False
    return any(Path(found.origin).parents[1].glob(f"{package}-*.dist-info"))


def _source(spec: str, card: ModelCard, sequence_length: int | None) -> ModelSource:
    sizes = card.sizes()
    length = sequence_length or card.sequence_length
    check_length(spec, length, sizes.maximum_positions)

    def build() -> Any:
        module, name = FAMILIES[card.family].module.split(":")
        return getattr(import_module(module), name)(sizes)

    def example_inputs(module: Any, micro_batch: int) -> Any:
        return module.example_inputs(micro_batch, length)

    return ModelSource(spec, build, example_inputs, length)


def _problems(card: ModelCard) -> Iterator[Problem]:
    """Find what is wrong with a card beyond its types."""
    family = FAMILIES.get(card.family)
    if family is None:
        near = get_close_matches(card.family, FAMILIES, n=1)
        expected, advice = f"one of {', '.join(FAMILIES)}", f"did you mean {near[0]}?" if near else ""
        yield Problem(("family",), "is not known", repr(card.family), expected, advice)
        return
    sizes, problems = validate(card.config, family.config, ("config",))
    yield from problems
    if sizes is not None and not 1 <= card.sequence_length <= sizes.maximum_positions:
        expected = f"from 1 to maximum_positions, {sizes.maximum_positions}"
        yield Problem(("sequence_length",), "is wrong", str(card.sequence_length), expected)
