"""Where modules and tensors lie in a model: tied parameters and shared buffers have several places and names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)

ParameterSite = tuple[nn.Module, str]
"""A module, and the name under which it knows a tensor."""


@dataclass(frozen=True, eq=False)
class Registration(Generic[T]):
    """A tensor and all its places."""

    tensor: T
    names: list[str] = field(default_factory=list)
    """Fully qualified, in the order of the model; the first is the one of `named_parameters()`."""
    places: list[ParameterSite] = field(default_factory=list)


def registered_parameters(model: nn.Module) -> dict[str, Registration[nn.Parameter]]:
    """Return every parameter once, by its first name."""
    return _registered(model, lambda module: module.named_parameters(recurse=False, remove_duplicate=False))


def registered_buffers(model: nn.Module) -> dict[str, Registration[Tensor]]:
    """Return every buffer once, by its first name."""
    return _registered(model, lambda module: module.named_buffers(recurse=False, remove_duplicate=False))


def _registered(model: nn.Module, own: Callable[[nn.Module], Iterator[tuple[str, T]]]) -> dict[str, Registration[T]]:
    found: dict[int, Registration[T]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in own(module):
            registration = found.setdefault(id(tensor), Registration(tensor))
            registration.names.append(f"{path}.{leaf}" if path else leaf)
            registration.places.append((module, leaf))
    return {registration.names[0]: registration for registration in found.values()}


def is_inside(path: str, outer: str) -> bool:
    """Whether a module's path is another's, or lies in it; the model's own is empty."""
    return outer in ("", path) or path.startswith(outer + ".")


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that lie in none of the others: wrapping a module wraps what is in it."""
    return tuple(path for path in paths if not any(path != other and is_inside(path, other) for other in paths))
