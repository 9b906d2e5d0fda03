"""Teachers that follow a student by methods of the model, whatever the strategies of either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

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


FOLLOWS: list[Callable[[Parameters, Parameters], None]] = [lerp, by_data, by_data_of_the_student, in_place, of_lists]


class Taught(nn.Module):
    """A student and a frozen teacher that learn from each other's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.student = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)) for _ in range(2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, how: Callable[[Parameters, Parameters], None]) -> None:
        """Move the teacher towards the student."""
        how(list(self.teacher.parameters()), list(self.student.parameters()))

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


def trained(model: nn.Module, how: Callable[[Parameters, Parameters], None], rank: int, *, is_plain: bool) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(STEPS):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        for parameter in model.parameters() if is_plain else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
        model.follow(how)  # type: ignore[operator]


def compare(rank: int) -> list[str]:
    """Return where training differs from plain data parallelism."""
    from osdp import OSDP

    wrong = []
    for number, (teacher, student) in enumerate(product(STRATEGIES, STRATEGIES)):
        followed = FOLLOWS[number % 2 :: 2] if teacher != "replicate" else FOLLOWS
        if {teacher, student} == {"shard", "owner"}:  # whose rows are others': that is refused
            followed = [how for how in followed if how is not by_data_of_the_student]
        for how in followed:
            alone = built()
            trained(alone, how, rank, is_plain=True)
            pins = ["*=shard", f"teacher.*={teacher}", f"student.*={student}"]
            model = OSDP(built(), {"micro_batch": 4, "optimizer": "sgd", "pins": pins})
            trained(model, how, rank, is_plain=False)
            found = model.full_state_dict(rank0_only=False)
            far = [name for name, one in alone.state_dict().items() if not torch.allclose(found[name], one, atol=1e-6)]
            wrong += [f"{how.__name__}, {pins}: {far}"] if far else []
    return wrong


def test_a_method_of_the_model_may_move_the_teacher() -> None:
    """A frozen teacher that every rank has whole was refused beside a sharded student; and with `.data` ended ranks."""
    assert run_ranks(compare, RANKS) == [[], []]
