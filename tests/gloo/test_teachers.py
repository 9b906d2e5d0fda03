"""Teachers that follow a student by a method of the model or in a loop, whatever the strategies of either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from toys import refusal

WIDTH, RANKS, STEPS = 16, 2, 2
STRATEGIES = ("shard", "replicate", "owner")
Parameters = list[nn.Parameter]


def lerp(teacher: Parameters, student: Parameters) -> None:
    for one, other in zip(teacher, student, strict=True):
        one.lerp_(other, 0.1)


def by_data(teacher: Parameters, student: Parameters) -> None:
    """Sets plain tensors to what is computed of DTensors."""
    for one, other in zip(teacher, student, strict=True):
        one.data = one.data * 0.9 + other.data * 0.1


def by_data_of_the_student(teacher: Parameters, student: Parameters) -> None:
    for one, other in zip(teacher, student, strict=True):
        one.data = other.data * 0.5


def in_place(teacher: Parameters, student: Parameters) -> None:
    for one, other in zip(teacher, student, strict=True):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)


def of_lists(teacher: Parameters, student: Parameters) -> None:
    torch._foreach_lerp_(teacher, student, 0.1)  # type: ignore[arg-type]


Follow = Callable[[Parameters, Parameters], None]
INSIDE: list[Follow] = [lerp, in_place, by_data, of_lists]
"""What a method of the model does."""
OUTSIDE: list[Follow] = [lerp, by_data, by_data_of_the_student, in_place, of_lists]
"""What a loop does."""


class Taught(nn.Module):
    """A student and a frozen teacher that learn from each other's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.student = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)) for _ in range(2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, how: Follow) -> None:
        """Move the teacher towards the student."""
        how(list(self.teacher.parameters()), list(self.student.parameters()))

    def drawn(self, rank: int) -> Tensor:
        """Return other numbers on each rank, computed with a parameter that no forward gathers."""
        return self.first.bias + torch.full((3, WIDTH), float(rank))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        x = self.first(x)
        student, teacher = self.head(self.student[1](self.student[0](x).relu())), x
        with torch.no_grad():
            teacher = self.head(self.teacher[1](self.teacher[0](x).relu()))
        return (student - teacher + 1).square().mean()  # type: ignore[no-any-return]

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


def built() -> Taught:
    torch.manual_seed(0)
    return Taught()


def trained(model: Any, how: Follow, rank: int, *, is_plain: bool, inside: bool) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(STEPS):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        for parameter in model.parameters() if is_plain else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
        if inside:
            model.follow(how)
        else:
            with torch.no_grad():
                how(list(model.teacher.parameters()), list(model.student.parameters()))


def compare(rank: int) -> list[str]:
    """Return where training differs from plain data parallelism."""
    from osdp import OSDP

    wrong = []
    for number, (teacher, student) in enumerate(product(STRATEGIES, STRATEGIES)):
        ways = [*product(INSIDE, [True]), *product(OUTSIDE, [False])]
        for how, inside in ways[number % 3 :: 3] if teacher != "replicate" else ways[number % 2 :: 2]:
            if how is by_data_of_the_student and {teacher, student} == {"shard", "owner"}:
                continue  # their rows are others': that is refused
            if how is by_data and inside and teacher == "replicate" != student:
                continue  # what is computed of a whole one meets rows: that is refused too
            alone = built()
            trained(alone, how, rank, is_plain=True, inside=inside)
            pins = ["*=shard", f"teacher.*={teacher}", f"student.*={student}"]
            model = OSDP(built(), {"micro_batch": 4, "optimizer": "sgd", "pins": pins})
            trained(model, how, rank, is_plain=False, inside=inside)
            found = model.full_state_dict(rank0_only=False)
            far = [name for name, one in alone.state_dict().items() if not torch.allclose(found[name], one, atol=1e-6)]
            wrong += [f"{how.__name__}, {inside}, {pins}: {far}"] if far else []
    return wrong


def refuse(rank: int) -> str:
    """Return what is said where each rank's own numbers meet a sharded parameter, or what is computed."""
    from osdp import OSDP

    model = OSDP(built(), {"micro_batch": 4, "optimizer": "sgd", "pins": ["*=shard"]})
    return refusal(lambda: model.drawn(rank))


def test_a_method_of_the_model_or_a_loop_may_move_the_teacher() -> None:
    """A frozen teacher that every rank has whole was refused beside a sharded student; and with `.data` ended ranks."""
    assert run_ranks(compare, RANKS) == [[], []]


def test_what_ranks_draw_themselves_is_not_taken_for_whole() -> None:
    for said in run_ranks(refuse, RANKS):
        assert said.startswith("a parameter is used where it is not gathered")
