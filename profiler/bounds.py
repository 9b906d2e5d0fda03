"""Bounds of whole numbers that users give, as options and in files.

No machine, model or run has more: a larger number is a slip, which would be counted up to for hours, or overflow where
nobody expects it.
"""

from typing import Annotated

from annotated_types import Ge, Le

MOST_NODES = 1 << 16
MOST_RANKS_PER_NODE = 1 << 10
MOST_RANKS = MOST_NODES * MOST_RANKS_PER_NODE
MOST_SAMPLES = 1 << 24
"""Of a rank in one forward."""
MOST_SAMPLES_OF_A_STEP = 1 << 40
MOST_TOKENS = 1 << 30
"""Of a sample."""
MOST_STEPS = 1 << 40
MOST_BYTES = 1 << 60
MOST_LAYERS = 1 << 16
LARGEST_SIZE = 1 << 28
"""Of a dimension of a parameter: the product of two, in bytes, stays below 2^63."""
LARGEST_SEED = (1 << 63) - 1
"""What `torch.manual_seed` takes."""
MOST_REPETITIONS = 10_000

NodeCount = Annotated[int, Ge(1), Le(MOST_NODES)]
RanksPerNode = Annotated[int, Ge(1), Le(MOST_RANKS_PER_NODE)]
Samples = Annotated[int, Ge(1), Le(MOST_SAMPLES)]
SamplesOfAStep = Annotated[int, Ge(1), Le(MOST_SAMPLES_OF_A_STEP)]
Tokens = Annotated[int, Ge(1), Le(MOST_TOKENS)]
Steps = Annotated[int, Ge(1), Le(MOST_STEPS)]
StepsOrNone = Annotated[int, Ge(0), Le(MOST_STEPS)]
"""Steps, or 0."""
Bytes = Annotated[int, Ge(0), Le(MOST_BYTES)]
Layers = Annotated[int, Ge(1), Le(MOST_LAYERS)]
Size = Annotated[int, Ge(1), Le(LARGEST_SIZE)]
Seed = Annotated[int, Ge(0), Le(LARGEST_SEED)]
