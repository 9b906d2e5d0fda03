"""Tensors in the arguments and outputs of modules and ops, and how an op's outputs are made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from profiler.nested_tensors import tensors_in
from profiler.trace.elementwise import Layout
from profiler.trace.handover import dense_layout
from profiler.trace.shapes import Layouts


def handed_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors in arguments, of which nearly all modules take nothing else."""
    values = [*args, *kwargs.values()]
    return values if all(isinstance(value, Tensor) for value in values) else tensors_in(values)


def read_argument(value: Any, description: list[Any], tensors: list[Tensor]) -> None:
    """Add an argument to an op's description, and its tensors to those that the op reads."""
    if isinstance(value, Tensor):
        tensors.append(value)
        description += (value.shape, value.stride(), value.dtype)
    elif isinstance(value, (list, tuple)):
        description.append(len(value))
        for item in value:
            read_argument(item, description, tensors)
    else:
        description += (value.__class__, value)  # the class, because 1 == 1.0 == True


def output_tensors(out: Any) -> list[Tensor]:
    """Return the tensors among an op's outputs."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [tensor for item in out for tensor in output_tensors(item)]
    return []


def output_layouts(out: Any) -> Layouts | None:
    """Return how to make outputs like `out` again, or None where they are not plain tensors."""
    if isinstance(out, Tensor):
        return dense_layout(out)
    if not isinstance(out, tuple):
        return None
    layouts = [None if item is None else output_layouts(item) for item in out]
    if any(layout is None and item is not None for layout, item in zip(layouts, out, strict=True)):
        return None
    return [layout if isinstance(layout, Layout) else None for layout in layouts]
