"""Random models under random plans in random training loops, on ranks and in one process, action by action.

A draw is a number: the model and the plan (`drawn_plans.py`) and the actions (`drawn_actions.py`) follow from it.  All
draws of a call are made by the same ranks, which train as `drawn_training.py` says.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from drawn_actions import Action
from drawn_models import Drawn
from drawn_plans import DRAWS_PER_MODEL, Draw
from drawn_training import Loop
from ranks import RankError, run_ranks

from osdp.models.user_factory import source_of
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model
from runtime.failures.rank_agreement import from_rank_0

REFUSALS = ("aten._local_scalar_dense",)
"""What may be said of a draw before its first step, in place of training it; anything else fails."""


def make_draws(
    rank: int, numbers: Sequence[int], ranks: tuple[int, int], actions_of: Callable[[Draw], list[Action]]
) -> Counter[str]:
    """Train draw after draw; return how often which refusal was said. Raises with all that repeats a draw."""
    refused: Counter[str] = Counter()
    graphs: dict[int, ModelGraph | str] = {}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(from_rank_0("name a folder", lambda: own))
        for number in numbers:
            model, actions, done = number // DRAWS_PER_MODEL, [], 0
            loop: Any = None
            try:
                if model not in graphs:
                    graphs.clear()
                    graphs[model] = from_rank_0("trace", partial(_traced, model))
                graph = graphs[model]
                if isinstance(graph, str):
                    raise OsdpError(graph)
                draw = Draw(number, ranks, graph)
                actions = actions_of(draw)
                with mock.patch("osdp.prepare.trace_model", lambda *_, graph=graph, **__: graph):
                    loop = Loop(draw, rank, folder)
                    for name, arguments in actions:
                        getattr(loop, name)(**arguments)
                        done += 1
            except Exception as error:
                known = [text for text in REFUSALS if text in str(error)]
                has_stepped = any(name == "step" for name, _ in actions[: done + 1])
                if isinstance(error, OsdpError) and known and not has_stepped:
                    refused[known[0]] += 1
                    continue
                shown = [f"  {index} {name} {arguments}" for index, (name, arguments) in enumerate(actions[: done + 1])]
                plan = loop.model.plan if loop else None
                what = f"{plan.choices} {plan.recomputed_blocks} {plan.accumulation}" if plan else ""
                said = [f"draw {number} failed on rank {rank}: {error}", str(Drawn(model)), what, *shown]
                raise AssertionError("\n".join(said)) from error
    return refused


def _traced(number: int) -> ModelGraph | str:
    """Return a model's graph, or why it cannot be traced."""
    try:
        return trace_model(source_of(partial(Drawn, number), "drawn", None, None))
    except OsdpError as error:
        return str(error)


def check_draws(numbers: Sequence[int], ranks: tuple[int, int], actions_of: Callable[[Draw], list[Action]]) -> None:
    """Make draws on ranks; an AssertionError says of up to three that failed what repeats them."""
    failures: list[str] = []
    left, refused = list(numbers), Counter[str]()
    while left and len(failures) < 3:
        some = left[:200]
        try:
            refused += run_ranks(
                make_draws, ranks[0] * ranks[1], some, ranks, actions_of, ranks_per_node=ranks[1],
                timeout_s=60 + 5 * len(some), collective_timeout_s=30,
            )[0]  # fmt: skip
            left = left[len(some) :]
        except RankError as error:
            found = re.search(r"draw (\d+) failed", str(error))
            if found is None:
                raise
            failures.append(f"{error}\nTo repeat: pytest tests/gloo/test_drawn_*.py --draw {found[1]}")
            left = [number for number in left if number > int(found[1])]
    if failures:
        raise AssertionError("\n\n".join(failures))
    assert sum(refused.values()) <= 0.1 * len(numbers) + DRAWS_PER_MODEL, refused
