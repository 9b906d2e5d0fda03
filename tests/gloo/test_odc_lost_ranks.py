"""Models whose units pull and push when a rank is lost in the middle of a step, and what is left of them afterwards."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import nn
from toys import Blocks, batch_of, loss_of, plan_of, refusal, seeded

from osdp import OSDP
from runtime.failures.peer_faults import PeerLost, naming_faults
from runtime.odc import shared_segment, windows
from runtime.odc.rendezvous import Rendezvous

TIMEOUT_S = 4.0
"""Timeout of the process group, and so of meetings."""
LOST = 2
build = partial(Blocks, frozen=False)


def osdp(choice: str, ranks: tuple[int, int], choices: Mapping[str, str] | None = None) -> Any:
    """Return a model under a plan that gives all but some operators the same."""
    return OSDP(seeded(build), plan_of(build(), choice, choices, ranks=ranks))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def step_of(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Train a step."""
    args, kwargs = batch_of(build(), rank, step)
    loss_of(model(*args, **kwargs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def falter(how: str, *_: Any) -> None:
    """Die, stop or raise."""
    if how == "raises":
        raise ZeroDivisionError
    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)


def _loses_one(
    rank: int, folder: Path, how: str, choice: str, ranks: tuple[int, int], choices: Mapping[str, str]
) -> tuple[str, float]:
    """Lose a rank in the backward of the second step; return what the others are told, and after how long."""
    (folder / str(rank)).write_text(str(os.getpid()))
    model = osdp(choice, ranks, choices)
    optimizer = sgd(model)
    step_of(model, optimizer, rank, 0)
    if rank == LOST:
        model.module.blocks[1].register_full_backward_hook(partial(falter, how))
        with pytest.raises(ZeroDivisionError):
            step_of(model, optimizer, rank, 1)
        # As Python does when the process ends.
        del model, optimizer
        gc.collect()
        return "", 0.0
    started_s = time.monotonic()
    with pytest.raises(PeerLost) as caught, naming_faults("step 1", TIMEOUT_S):
        step_of(model, optimizer, rank, 1)
    took_s = time.monotonic() - started_s
    if not choices:
        args, kwargs = batch_of(build(), rank)
        assert "cannot be used any more" in refusal(lambda: model(*args, **kwargs))
    return str(caught.value), took_s


def files_of(folder: Path) -> list[Path]:
    """Return the files in shared memory that the ranks of a run have left."""
    pids = [file.read_text() for file in folder.iterdir()]
    assert len(pids) == 4
    return [path for pid in pids for path in shared_segment.FOLDER.glob(f"{shared_segment.PREFIX}{pid}-*")]


def trains(rank: int) -> dict[str, torch.Tensor]:
    """Train two steps; return the parameters."""
    model = osdp("odc:4", (1, 4))
    optimizer = sgd(model)
    for step in range(2):
        step_of(model, optimizer, rank, step)
    state: dict[str, torch.Tensor] = model.full_state_dict(rank0_only=False)
    return state


@pytest.mark.parametrize(
    ("how", "choice", "ranks", "choices", "told"),
    [
        ("stalls", "odc:4", (1, 4), {}, "rank 2 did not reach the barrier"),
        ("raises", "odc:4", (1, 4), {}, "rank 2 closed its windows"),
        ("dies", "odc:2", (2, 2), {}, "rank 2 died"),
        # In a collective, or by its neighbour at a barrier of windows.
        ("stalls", "odc_ordered:2", (2, 2), {}, "rank 2 (is stopped|did not)"),
        ("dies", "odc:4", (1, 4), {"blocks.0.up": "shard"}, "rank 2 died"),
        *([("dies", "odc:2", (1, 4), {"head": "odc:4"}, "rank 2 died")] if THOROUGH else []),
    ],
)
def test_a_rank_that_is_lost_in_a_step_is_named(
    how: str, choice: str, ranks: tuple[int, int], choices: Mapping[str, str], told: str, tmp_path: Path
) -> None:
    # A rank that waits for one that is fine, and has given up, waits for the timeout, and then asks around.
    at_once = how != "stalls" and ranks == (1, 4) and not choices
    check(tmp_path, how, choice, ranks, choices, told, within_s=TIMEOUT_S if at_once else 2 * TIMEOUT_S + 3)


def check(
    folder: Path, how: str, choice: str, ranks: tuple[int, int], choices: Mapping[str, str], told: str, within_s: float
) -> None:
    """Lose a rank; all others must be told so in time, and nothing be left."""
    results = run_ranks(
        _loses_one,
        4,
        folder,
        how,
        choice,
        ranks,
        choices,
        ranks_per_node=ranks[1],
        lost=() if how == "raises" else (LOST,),
        collective_timeout_s=TIMEOUT_S,
    )
    for rank in (0, 1, 3):
        message, took_s = results[rank]
        assert re.search(told, message), message
        assert took_s < within_s
    assert files_of(folder) == []


def test_a_run_after_a_lost_one_trains(tmp_path: Path) -> None:
    check(tmp_path, "dies", "odc:4", (1, 4), {}, "rank 2 died", within_s=TIMEOUT_S)
    reference = seeded(build)
    optimizer = sgd(reference)
    for step in range(2):
        batches = [batch_of(build(), rank, step) for rank in range(4)]
        torch.stack([loss_of(reference(*args, **kwargs)) for args, kwargs in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_ranks(trains, 4):
        torch.testing.assert_close(state, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


# --- refusals at the start


def _differs(rank: int) -> tuple[str, str]:
    """Have the last rank have another plan, and then be of another version."""
    plan = refusal(lambda: osdp("odc:4" if rank == 3 else "odc:2", (1, 4)))
    windows.FORMAT += rank == 3
    version = refusal(lambda: osdp("odc:2", (1, 4)))
    assert mapped_bytes() == 0
    return plan, version


def test_ranks_that_differ_are_refused_on_all() -> None:
    """Also on those of another group, which would else wait for them."""
    for plan, version in run_ranks(_differs, 4):
        assert plan.startswith("the schedule is not the same on all ranks\n  got: ranks 3 differ from rank 0"), plan
        assert version.startswith("the windows of rank 3 differ from those of rank 2"), version


# --- nothing is left


def mapped_bytes() -> int:
    """Return how much of windows' files is part of this process' memory."""
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"{shared_segment.FOLDER}/{shared_segment.PREFIX}" in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def _comes_and_goes(rank: int, times: int) -> None:
    """Make and drop a model many times; train every fifth."""
    held = []
    plan = plan_of(build(), "odc:2", {"head": "odc_ordered:2"}, ranks=(1, 2))
    gc.freeze()  # what there is now need not be looked through every time
    for step in range(times):
        model: Any = OSDP(seeded(build), plan)
        if step % 5 == 0:
            step_of(model, sgd(model), rank, step)
        assert mapped_bytes() > 0
        assert not list(shared_segment.FOLDER.glob(f"{shared_segment.PREFIX}{os.getpid()}-*"))
        del model
        gc.collect()
        held.append((len(os.listdir("/proc/self/fd")), mapped_bytes()))
    assert held == [(held[0][0], 0)] * times


def test_models_that_come_and_go_leave_nothing() -> None:
    run_ranks(_comes_and_goes, 2, 50 if THOROUGH else 11)


def test_a_rank_that_closes_and_ends_between_two_looks_at_it_closed() -> None:
    segment = SimpleNamespace(state=shared_segment.OPEN)

    def ends_meanwhile() -> bool:
        segment.state = shared_segment.CLOSED
        return False

    segment.is_alive = ends_meanwhile
    gone = Rendezvous.gone(SimpleNamespace(segments=[segment]), 0)  # type: ignore[arg-type]
    assert gone == "closed its windows"


def test_who_gave_up_for_a_rank_that_is_gone_is_not_named_for_it() -> None:
    closed: list[bool] = []

    class Silent:
        """The segment of a rank that lives and does not reach the barrier."""

        def __init__(self, state: Callable[[], int]) -> None:
            self._state = state

        state = property(lambda self: self._state())
        is_alive = reach = lambda self, *_: True
        has_reached = lambda self, *_: False  # noqa: E731

    def gives_up() -> int:
        closed.append(True)  # rank 2 was looked at before, and closes in between
        return 2

    rendezvous: Any = Rendezvous.__new__(Rendezvous)
    rendezvous.ranks, rendezvous.rank = (0, 1, 2), 1
    of_rank_2 = Silent(lambda: shared_segment.CLOSED if closed else shared_segment.OPEN)
    rendezvous.segments = [Silent(gives_up), Silent(lambda: shared_segment.OPEN), of_rank_2]
    with pytest.raises(PeerLost, match=r"failed: rank 2 closed its windows\n"):
        rendezvous.wait(2, 0.0, timeout_s=5.0)
