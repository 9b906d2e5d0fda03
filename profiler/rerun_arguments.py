"""What a recomputed block is handed when its forward runs again: lists, dicts and dataclasses as they first were.

    forward      block(hidden)     hidden.append(...)  by the code around it, or hidden.pop() by the block itself
    backward     block(copy)

`checkpoint` keeps arguments, and lists among them as they have become by then.  The first forward gets the originals,
since the code around may read what the block does to them; each later one gets copies of its own.  Tensors in them are
the same, held until the block's backward.
"""

from collections.abc import Callable
from copy import copy as shallow_copy
from typing import Any

from profiler.handed_containers import items_of, put, tuple_like

Forward = Callable[..., Any]


def handed_alike(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """Return a forward and arguments for `checkpoint` in place of these."""
    originals = [(args, kwargs)]

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = originals.pop() if originals else copied((args, kwargs))
        return forward(*args, **kwargs)

    return run, *copied((args, kwargs))


def copied(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Return a value with copies of the containers that it is made of, and what else is in them as it is.

    What is there at several places is one copy; `made` has those by identity.
    """
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, tuple):
        parts = [copied(part, made) for part in value]
        return value if all(part is old for part, old in zip(parts, value, strict=True)) else tuple_like(value, parts)
    if (items := items_of(value)) is None:
        return value
    made[id(value)] = copy = shallow_copy(value)
    for key, item in items.items():
        put(copy, key, item, copied(item, made))
    return copy
