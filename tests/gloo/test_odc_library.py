"""On-demand communication for models that FSDP1 and FSDP2 wrap: they train what they train without it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from odc_library import (
    FSDP1,
    FSDP2,
    build,
    clip,
    face_of,
    micro_batch,
    parameters_of,
    patched,
    sgd,
    step,
    step_of_all,
    wrapped,
)
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from toys import seeded

from osdp import odc

STEPS = 4 if THOROUGH else 2
"""Of models that are compared step by step: the second has a momentum. Those of uneven ranks have six steps."""
SOME_OF_FSDP1 = ["fsdp1", "fsdp1, kept, original", "fsdp1, bf16"]
"""Of FSDP1's ways one of each trait, which come two at a time in the second."""
MAX_NORM = 0.02
"""Low enough that every step is clipped (checked)."""


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], way: str = "") -> None:
    """Compare; of bf16 a mantissa has 8 bits, so that 2e-3 is half a unit in the last place."""
    rtol, atol = (2e-3, 5e-4) if "bf16" in way else (1e-5, 1e-6)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def parameters_in(reference: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of one process."""
    return {name: parameter.detach() for name, parameter in reference.named_parameters()}


# --- parity with plain FSDP, step by step


def _trains(rank: int, ways: list[str], frozen: bool, ordered: bool = False) -> None:
    """Train with two micro-batches a step and clipping; compare losses, norms and parameters of each step."""
    for way in ways:
        face, close = face_of(way), 1e-2 if "bf16" in way else 1e-5
        odc.init(ordered=ordered)
        model, plain = patched(way, frozen), wrapped(way, frozen)
        optimizer, other = sgd(model), sgd(plain)
        for number in range(STEPS):
            face.pre_minibatch_start(model)
            for k in range(2):
                got, wanted = (micro_batch(each, rank, 10 * number + k, 2) for each in (model, plain))
                assert got == pytest.approx(wanted, rel=close), way
            face.pre_optimizer_step(model)
            norm = clip(plain, MAX_NORM)
            assert norm > MAX_NORM
            assert clip(model, MAX_NORM) == pytest.approx(norm, rel=close), way
            step(optimizer)
            step(other)
            assert_same(parameters_of(model), parameters_of(plain), way)
        face.stop()


@pytest.mark.parametrize("ways", [[*FSDP2], [*FSDP1] if THOROUGH else SOME_OF_FSDP1], ids=["fsdp2", "fsdp1"])
def test_every_step_is_as_without(ways: list[str]) -> None:
    run_ranks(_trains, 2, ways, False)


def test_frozen_parameters_and_ordered_sums() -> None:
    run_ranks(_trains, 3, ["fsdp2", "fsdp1, original"], True, True)


def test_replicas_are_reduced_once_per_step() -> None:
    run_ranks(_trains, 4, ["hsdp"], False)


# --- ranks that do different numbers of micro-batches


UNEVEN = ([1, 3], [2, 2], [0, 2], [4, 0], [3, 3], [0, 0])
"""By step: how many micro-batches each of two ranks has; a rank may have none."""


@cache
def uneven_alone() -> list[dict[str, Tensor]]:
    """Return the parameters after each step of the mean over all micro-batches, in one process."""
    reference, found = seeded(build), []
    optimizer = sgd(reference)
    for number, counts in enumerate(UNEVEN):
        if any(counts):
            step_of_all(reference, optimizer, counts, number, sum(counts))
        found.append({name: parameter.clone() for name, parameter in parameters_in(reference).items()})
    return found


def _uneven(rank: int, ways: list[str], is_told: bool, alone: list[dict[str, Tensor]]) -> None:
    """Compare each step with one process."""
    planned = 2
    for way in ways:
        face = face_of(way)
        odc.init(accumulation=planned)
        model = patched(way)
        optimizer = sgd(model)
        face.pre_minibatch_start(model)
        for number, (counts, wanted) in enumerate(zip(UNEVEN, alone, strict=True)):
            for k in range(counts[rank]):
                micro_batch(model, rank, 10 * number + k, planned)
            told = (counts[rank],) if is_told else ()
            face.pre_optimizer_step(model, *told)
            if any(counts):
                step(optimizer)
            assert_same(parameters_of(model), wanted, way)
        face.stop()


@pytest.mark.parametrize(
    ("ways", "is_told"),
    [
        (["fsdp2"], True),
        (["fsdp2", "fsdp2, kept"], False),
        ([way for way in (FSDP1 if THOROUGH else SOME_OF_FSDP1) if "bf16" not in way], False),
    ],
)
def test_uneven_ranks_train_the_mean_over_all_micro_batches(ways: list[str], is_told: bool) -> None:
    run_ranks(_uneven, 2, ways, is_told, uneven_alone())


def _alone(rank: int) -> None:
    """Have the mean over the micro-batches of the only rank, too."""
    for way in ("fsdp2", "hsdp", "fsdp1"):
        face = face_of(way)
        odc.init(accumulation=2)
        model, reference = patched(way), seeded(build)
        optimizer, other = sgd(model), sgd(reference)
        for number, count in enumerate([3, 2, 1]):
            face.pre_minibatch_start(model)
            for k in range(count):
                micro_batch(model, rank, 10 * number + k, 2)
            face.pre_optimizer_step(model)
            step(optimizer)
            step_of_all(reference, other, [count], number, count)
        assert_same(parameters_of(model), parameters_in(reference), way)
        face.stop()


def test_one_rank() -> None:
    run_ranks(_alone, 1)


def test_uneven_replicas() -> None:
    run_ranks(_uneven_replicas, 4)


def _uneven_replicas(rank: int) -> None:
    """Have all ranks of a 2 x 2 mesh do other numbers."""
    face = face_of("hsdp")
    odc.init(accumulation=1)
    model, reference = patched("hsdp"), seeded(build)
    optimizer, other = sgd(model), sgd(reference)
    for number, counts in enumerate([[1, 3, 0, 2], [1, 1, 1, 1], [2, 0, 0, 0]]):
        face.pre_minibatch_start(model)
        for k in range(counts[rank]):
            micro_batch(model, rank, 10 * number + k)
        face.pre_optimizer_step(model)
        step(optimizer)
        step_of_all(reference, other, counts, number, sum(counts))
        assert_same(parameters_of(model), parameters_in(reference))
    face.stop()


def _sums(rank: int, ways: list[str]) -> None:
    """Call `pre_minibatch_start` once per epoch; have gradients be sums over a rank's micro-batches by default."""
    for way in ways:
        face = face_of(way)
        odc.init_nvshmem()
        model, reference = patched(way), seeded(build)
        optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
        for epoch in range(2):
            face.pre_minibatch_start(model)
            for number, counts in enumerate([[2, 1], [1, 3]], start=2 * epoch):
                for k in range(counts[rank]):
                    micro_batch(model, rank, 10 * number + k)
                face.pre_optimizer_step(model)
                step(optimizer)
                step_of_all(reference, other, counts, number, 2)
        assert_same(parameters_of(model), parameters_in(reference), way)
        face.stop()


def test_by_default_gradients_are_means_over_ranks() -> None:
    run_ranks(_sums, 2, ["fsdp2", "fsdp1"])
