"""Optimizer steps by a counting clock, and against each other."""

from __future__ import annotations

import pytest
import torch
from clocks import CountingClock, ThreadClock, one_thread

from profiler.cluster.figure import Figure
from profiler.cluster.measurements import OptimizerTimes
from profiler.errors import OsdpError
from profiler.timing.optimizer_times import WARM_UP_STEPS, optimizer_times
from runtime.optimizers import OPTIMIZERS

CPU = torch.device("cpu")


def test_optimizer_steps_are_per_byte_with_a_barrier_before_each() -> None:
    barriers: list[None] = []
    found = optimizer_times([(3, 5), (7,)], OPTIMIZERS, CPU, 4, lambda: barriers.append(None), clock=CountingClock())
    assert [one.name for one in found] == ["adam", "adamw", "sgd", "fused_adam", "fused_adamw", "fused_sgd"]
    # A step takes one tick whatever its tensors are: half a tick for each of two, and nothing for their bytes.
    assert [one.s_per_tensor.value for one in found] == pytest.approx([1 / 2] * 6)
    assert [one.s_per_byte.value for one in found] == [0.0] * 6
    assert len(barriers) == 6 * 2 * (WARM_UP_STEPS + 4)


def test_steps_are_of_tensors_as_they_are_held() -> None:
    """As DTensors, say, whose dispatch takes longer than their steps."""
    stepped: list[torch.Tensor] = []

    class Held(torch.Tensor):
        """What parameters are."""

    class Noting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            stepped.extend(one for group in self.param_groups for one in (*group["params"], group["params"][0].grad))

    found = optimizer_times([(3, 5)], {"sgd": Noting}, CPU, 1, held=lambda tensor: tensor.as_subclass(Held))
    assert [one.name for one in found] == ["sgd"]
    assert {type(tensor) for tensor in stepped} == {Held}


def test_a_step_is_so_much_per_tensor_and_per_byte() -> None:
    one = OptimizerTimes("adam", Figure(1e-5, "measured: a test"), Figure(2e-9, "measured: a test"))
    assert one.step_s(10, 1e6) == pytest.approx(1e-4 + 2e-3)


def test_adam_touches_more_than_sgd() -> None:
    """Per parameter Adam reads and writes 7 numbers, SGD 3: so it is measured, at the third time on a busy machine."""
    both, found = {name: OPTIMIZERS[name] for name in ("sgd", "adam")}, list[tuple[float, float]]()
    for _ in range(3):
        with one_thread():
            sgd, adam = optimizer_times([(1024, 1024)], both, CPU, 9, clock=ThreadClock())
        found.append((sgd.s_per_byte.value, adam.s_per_byte.value))
        if found[-1][1] > 1.5 * found[-1][0] > 0:
            return
    pytest.fail(f"seconds per byte of SGD and of Adam: {found}")


@pytest.mark.parametrize(("shapes", "repetitions"), [([], 1), ([(0, 3)], 1), ([(2,)], 0)])
def test_no_optimizer_step_is_refused(shapes: list[tuple[int, ...]], repetitions: int) -> None:
    with pytest.raises(OsdpError, match="no optimizer step"):
        optimizer_times(shapes, OPTIMIZERS, CPU, repetitions)
