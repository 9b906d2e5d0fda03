"""What a recomputed block is handed when its forward runs again: lists, dicts and dataclasses as they first were.

    forward      block(hidden)     hidden.append(...)  by the code around it, or hidden.pop() by the block itself
    backward     block(copy)

`checkpoint` keeps arguments, and lists among them as they have become by then.  The first forward gets the originals,
since the code around may read what the block does to them; each later one gets copies of its own.  Tensors in them are
the same, held until the block's backward.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from torch.utils._pytree import tree_map

Forward = Callable[..., Any]

_CONTAINERS = frozenset({list, dict, tuple, OrderedDict, defaultdict, deque})


def handed_alike(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """Return a forward and arguments for `checkpoint` in place of these."""
    originals = [(args, kwargs)]

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = originals.pop() if originals else copied((args, kwargs))
        return forward(*args, **kwargs)

    return run, *copied((args, kwargs))


def copied(value: Any) -> Any:
    """Return a value with containers in place of the containers that it is made of, and what is in them as it is."""
    return tree_map(_copied_object, value, is_leaf=lambda part: type(part) not in _CONTAINERS)


def _copied_object(leaf: Any) -> Any:
    """Return a copy of a dataclass, of which containers are copied too, and anything else as it is."""
    if isinstance(leaf, (type, dict)) or not is_dataclass(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    made: Any = copy.copy(leaf)
    for name, value in vars(leaf).items():
        object.__setattr__(made, name, copied(value))
    return made
