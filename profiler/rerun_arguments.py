"""What a recomputed block is handed when its forward runs again: lists, dicts and dataclasses as they first were.

    forward      block(hidden)     hidden.append(...)  by the code around it, or hidden.pop() by the block itself
    backward     block(copy)

`checkpoint` keeps arguments, and lists among them as they have become by then.  The first forward gets the originals,
since the code around may read what the block does to them; each later one gets copies of its own.  Tensors in them are
the same, held until the block's backward.
"""

from collections import deque
from collections.abc import Callable, Iterable
from copy import copy as shallow_copy
from dataclasses import is_dataclass
from typing import Any

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
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, (list, deque)):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        items = [*value.items()]
    elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        items = [*vars(value).items()]
    else:
        return value
    made[id(value)] = copy = shallow_copy(value)
    for key, item in items:
        if (own := copied(item, made)) is not item:
            if isinstance(value, (list, deque, dict)):
                copy[key] = own
            else:
                object.__setattr__(copy, key, own)
    return copy
