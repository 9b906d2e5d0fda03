"""Runs of alike stages in a plan, so that what a plan costs is a sum over a few stages, however deep the model is.

Of a run of the same option, the two stages at either end have neighbours that the others do not have.  The stages
inside see the same as each other: each adds as much to every sum, and what is held changes by as much from one to the
next, so it is highest at an end.
"""

from collections.abc import Sequence
from itertools import groupby

from planner.cost.stage_option import StageCandidate

ENDS = 2
"""Stages at either end of a run that are looked at one by one: they, or their neighbours, see others outside it."""


def counted(options: Sequence[StageCandidate]) -> list[tuple[StageCandidate, int]]:
    """Return options in execution order, with how many stages each stands for: more than one inside a run."""
    found = list[tuple[StageCandidate, int]]()
    for _, alike in groupby(options, key=id):
        option, *others = alike
        inside = len(others) + 1 - 2 * ENDS
        ends = [(option, 1)] * (ENDS if inside > 1 else len(others) + 1)
        found += [*ends, (option, inside), *ends] if inside > 1 else ends
    return found
