"""What blocks are handed when they run again, and what that holds."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lists import Lists
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor
from trace_models import source

from profiler.rerun_arguments import copied, handed_alike
from profiler.trace.trace import trace_model


def test_the_first_run_gets_what_is_handed_and_others_get_it_as_it_was() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    handed: Any = [[one], (1, [one]), {"a": deque([one])}, OrderedDict(b=[one])]
    got: list[tuple[Any, ...]] = []

    def block(*args: Any, key: list[Tensor]) -> None:
        got.append((*args, key))
        args[0].append(two)
        args[1][1].clear()
        args[2]["a"].append(two)
        args[3]["c"] = two
        key.pop()

    key = [one]
    forward, args, kwargs = handed_alike(block, tuple(handed), {"key": key})
    forward(*args, **kwargs)
    assert all(mine is given for mine, given in zip(got[0], (*handed, key), strict=True))
    assert (handed[0], key) == ([one, two], [])
    handed[0].append(two)
    for _ in range(2):
        assert args == ([one], (1, [one]), {"a": deque([one])}, OrderedDict(b=[one]))
        assert kwargs == {"key": [one]}
        forward(*args, **kwargs)


class Named(NamedTuple):
    """A tuple with names."""

    items: list[Any]


class Titled(OrderedDict[str, Any]):
    """A dict with something of its own, as outputs of transformers are."""

    title = "of the class"


@dataclass
class Record:
    """A dataclass."""

    items: list[Any]


def test_what_is_handed_twice_is_one_copy_of_its_own_kind() -> None:
    shared = [torch.ones(1)]
    titled = Titled(items=shared)
    titled.title = "of its own"
    got: list[Any] = []
    forward, args, kwargs = handed_alike(
        lambda *all_of: got.append(all_of), (shared, Named(shared), Record(shared)), {}
    )
    forward(*args, **kwargs)
    named = copied(titled)
    shared.append(torch.zeros(1))
    titled["items"] = []
    forward(*args, **kwargs)
    first, again = got
    assert first[0] is shared
    own, pair, record = again
    assert (len(own), type(pair), type(record)) == (1, Named, Record)
    assert pair.items is own
    assert record.items is own
    assert own is not args[0]
    assert (type(named), named.title, len(named["items"])) == (Titled, "of its own", 1)


@pytest.mark.parametrize("build", [partial(Lists, 64), partial(Lists, 64, in_dict=True)])
def test_what_lists_hold_is_predicted(build: Any) -> None:
    model = source(build, (64, 64))
    graph, machine = trace_model(model), cluster(1, 4)
    blocks = [block.name for block in graph.blocks]
    for choice in ("shard", "replicate"):
        for recomputed, selective in ((blocks, []), ([], blocks)):
            choices = {one.name: choice for one in graph.operators}
            plan = plan_of(graph, machine, choices, recomputed, selective, micro_batch=8)
            assert abs(compare(plan, model, graph, machine).error) < 0.001, (choice, recomputed)
