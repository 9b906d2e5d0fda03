"""Which argument of a block is offloaded where its input is: the first tensor that needs a gradient.

A recomputed block holds on to what it is handed until its forward runs again.  Of that, what the block before it made
is its own, as a rule; masks, positions and the output of an encoder are handed to many.  `profiler.trace` tells whether
anything else holds it; the runtime takes the same argument.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor


def offloaded_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the position or the name of the argument that is offloaded, None if there is none."""
    named: Iterator[tuple[int | str, Any]] = chain(enumerate(args), kwargs.items())
    return next((name for name, one in named if isinstance(one, Tensor) and one.requires_grad), None)
