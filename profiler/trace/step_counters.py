"""Counters of steps that a model keeps, by which it does something else in every n-th step or from some step on.

    self.step += 1
    if self.step % 10 == 0: ...        # an average of weights, another bank of keys, new random features

Passes of a trace are steps, so without more each would be another step than the one before, and only some of them those
that take most.  Counters are what has changed after a pass:

    numbers in attributes of modules, and in dicts there
    tensors of one number with known values, if the pass read such a number into Python

if they are one more, or one again as in what counts to n.  (What goes on by other than one is an offset, or a number of
samples, by which a step may make as much as it says.)

Where there are some, steps that follow each other are tried, and if those are alike, or of few kinds, some that are
multiples of most numbers; in all passes that follow the counters are what they were before the one that took most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from profiler.trace.known_values import KnownValues, has_data

FOLLOWING = 12
"""So many steps that follow each other are tried: what is done in every n-th of up to twelve is among them."""
MULTIPLE = 2**7 * 3**2 * 5**3 * 7
"""Divisible by most numbers that people take, as are 64, 100, 128, 500 and 1000; and later than most steps from which
on something is done.
"""
DISTANT = (MULTIPLE - 1, MULTIPLE, MULTIPLE + 1)
"""Counters from which a step begins that counts first, that counts last, and that waits for a remainder of 1."""

_OF_MODULES = frozenset(vars(nn.Module()))


class _AreTensors(dict[type, bool]):
    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, Tensor)
        return self[kind]


_ARE_TENSORS = _AreTensors()
"""By type; asked of every attribute of a model, so that it is no function."""

Place = tuple[int, str]
"""Identity of a dict of attributes, and the name in it."""


@dataclass(frozen=True)
class Counters:
    """Where a model keeps numbers, and what they are before a step."""

    numbers: dict[Place, tuple[dict[Any, Any], Any, int]]
    """The dict that has one, its key there, and the number."""
    tensors: dict[Place, tuple[dict[Any, Any], Any, Tensor]]
    """The same of tensors, with a copy of what they hold."""

    def changed(self, now: Counters, *, was_read: bool) -> Counters:
        """Return those that are different `now`; tensors only if numbers of tensors were read into Python."""
        numbers = {
            at: one
            for at, one in now.numbers.items()
            if at in self.numbers and one[2] != self.numbers[at][2] and one[2] in _after(self.numbers[at][2])
        }
        tensors = {
            at: one
            for at, one in (now.tensors if was_read else {}).items()
            if at in self.tensors and one[2].item() in _after(self.tensors[at][2].item())
        }
        return Counters(numbers, tensors)

    def among(self, others: Counters) -> Counters:
        """Return those that are among others."""
        numbers = {at: one for at, one in self.numbers.items() if at in others.numbers}
        return Counters(numbers, {at: one for at, one in self.tensors.items() if at in others.tensors})

    def at(self, step: int) -> Counters:
        """Return the same counters, all of which say that it is some step."""
        numbers = {at: (attributes, name, step) for at, (attributes, name, _) in self.numbers.items()}
        tensors = {
            at: (attributes, name, torch.full_like(value, min(step, _most(value.dtype))))
            for at, (attributes, name, value) in self.tensors.items()
        }
        return Counters(numbers, tensors)

    def put(self, values: KnownValues) -> None:
        """Let the model's counters be these."""
        for attributes, name, number in self.numbers.values():
            attributes[name] = number
        for attributes, name, value in self.tensors.values():
            if isinstance(held := attributes.get(name), Tensor) and held.shape == value.shape:
                _hold(values, held, value)

    @contextmanager
    def standing(self, root: nn.Module, values: KnownValues) -> Iterator[None]:
        """Let the model's counters be these within: what holds them may be the user's."""
        before = counters_of(root, values).among(self)
        self.put(values)
        try:
            yield
        finally:
            before.put(values)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.tensors)


def counters_of(root: nn.Module, values: KnownValues) -> Counters:
    """Return all numbers that modules have, as they are now."""
    numbers = dict[Place, tuple[dict[Any, Any], Any, int]]()
    tensors = dict[Place, tuple[dict[Any, Any], Any, Tensor]]()
    for attributes in _dicts(root):
        for name, value in attributes.items():
            if value.__class__ is int:
                numbers[id(attributes), str(name)] = attributes, name, value
            elif (
                _ARE_TENSORS[value.__class__]
                and not value.requires_grad
                and (held := _number(value, values)) is not None
            ):
                tensors[id(attributes), str(name)] = attributes, name, held
    return Counters(numbers, tensors)


def _dicts(root: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts that have attributes of modules, buffers, parameters, and what is in plain dicts there."""
    found, seen, todo = list[dict[Any, Any]](), {root}, [root]
    for module in todo:  # `named_modules` takes longer, to find names
        attributes = module.__dict__
        found += [attributes]
        for name, value in attributes.items():
            if (
                value.__class__ is dict
                and value
                and (name not in _OF_MODULES or name == "_buffers" or name == "_parameters")
            ):
                found += [value]
        for child in module._modules.values() if module._modules else ():
            if child is not None and child not in seen:
                seen |= {child}
                todo += [child]
    return found


def _after(number: float) -> tuple[float, ...]:
    """Return what a counter may be after a step that began with a number."""
    return number + 1, 0 if number else number + 1, 1 if number > 1 else number + 1


def _most(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).max - FOLLOWING if not dtype.is_floating_point else MULTIPLE + 1


def _number(tensor: Tensor, values: KnownValues) -> Tensor | None:
    """Return the one number that a tensor holds, as a tensor with data; None if it holds others."""
    if tensor.numel() != 1 or tensor.dtype is torch.bool or has_data(tensor):
        return None
    known = values.read(tensor)
    return None if known is None else known.clone()


def _hold(values: KnownValues, tensor: Tensor, value: Tensor) -> None:
    values.assume(tensor, ("counter", value.item()), lambda: value)
