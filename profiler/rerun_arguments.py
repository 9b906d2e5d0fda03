"""What a recomputed block is handed when its forward runs again: lists and dicts as they were before it first ran.

    forward      block(hidden)     hidden.append(...)  by the code around it, or hidden.pop() by the block itself
    backward     block(copy)

`checkpoint` keeps arguments, and lists among them as they have become by then.  The first forward gets the originals,
since the code around may read what the block does to them; each later one gets copies of its own.  Tensors in them are
the same, held until the block's backward.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
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
    return tree_map(lambda leaf: leaf, value, is_leaf=lambda part: type(part) not in _CONTAINERS)
