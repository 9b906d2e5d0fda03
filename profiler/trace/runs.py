"""What the passes of a trace have found, from which a graph is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from profiler.model_graph import Recompute
from profiler.trace.find_operators import Group
from profiler.trace.metered_pass import Pass


@dataclass(frozen=True)
class Runs:
    """What was run of a model."""

    groups: Sequence[Group]
    """Its operators."""
    passes: Mapping[int, Pass]
    """By micro-batch."""
    recomputed: Mapping[int, Pass]
    """The same with every block recomputed, of fewer micro-batches; none if that failed."""
    selective: Mapping[int, Pass]
    """The same with every block recomputed selectively."""
    apart: Mapping[Recompute, Mapping[int, Pass]]
    """All of these with gradients that leave blocks one by one; none if it makes no difference, or failed."""
    samples: int
    """How many samples each pass counts as one."""
    left_out: set[str]
    """Operators that are left out if all rows choose alike."""
    failures: Mapping[Recompute, str]
    """Why no block could be recomputed so."""
    unused: Collection[str]
    """Parameters that are trained, of operators that run, on which no output depends."""
    beside: Collection[str]
    """Trained ones on which the loss does not depend, and another output does."""
    rerun: Collection[str]
    """Paths of the blocks that the model itself runs again in its backward, and that no pass recomputes."""
    partly: Collection[str]
    """Paths of those of which it runs a part again, and that no plan recomputes selectively."""
    let_go: Sequence[bool]
    """Of every execution of a block, whether nothing else holds the input that would be offloaded."""
    written: Collection[str]
    """Parameters that the model itself changes, in every step or only in its first, as layers do that begin so."""
    least: Sequence[str]
    """Modules in the order in which they begin in the step that takes least; none if all steps are alike."""
