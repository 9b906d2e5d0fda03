"""Layers that run and that no gradient reaches are named, as gradients of theirs are not counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from trace_models import source

from profiler.trace.trace import trace_model

WIDTH = 600


class Distilled(nn.Module):
    """A student, a teacher, a head that nothing uses, and parameters whose gradients no operation computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.teacher = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        if how == "frozen":
            self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.student(x)) + self.shift
        if self.how == "without gradients":
            with torch.no_grad():
                wanted = self.teacher(x)
        else:
            wanted = self.teacher(x)
        if self.how == "detached":
            wanted = wanted.detach()
        if self.how == "unused":
            self.head(y).softmax(-1)
        else:
            y = torch.cat([y, self.head(y)], dim=1)
            wanted = nn.functional.pad(wanted, (0, 4))
        return (y - wanted).pow(2).mean()


TEACHER = ("teacher.0", "teacher.1", "teacher.2")


@pytest.mark.parametrize(
    ("how", "names"),
    [("taught", ()), ("frozen", ()), ("detached", TEACHER), ("without gradients", TEACHER), ("unused", ("head",))],
)
def test_they_are_named(how: str, names: tuple[str, ...]) -> None:
    model = Distilled(how)
    model(torch.randn(4, WIDTH)).backward()  # as in PyTorch
    assert names == tuple(
        path
        for path, part in model.named_modules()
        if part._parameters and all(one.requires_grad and one.grad is None for one in part.parameters())
    )
    notes = [note for note in trace_model(source(lambda: Distilled(how), (WIDTH,))).notes if "no gradient" in note]
    size_bytes = sum(one.nbytes for name in names for one in model.get_submodule(name).parameters())
    assert len(notes) == bool(names)
    for note in notes:
        assert note.startswith(f"no gradient reaches {'teacher.*' if names == TEACHER else 'head'}: ")
        assert f" {size_bytes / 2**20:.1f} MiB of parameters, and a later step" in note


def test_parameters_of_the_model_itself_are_named_in_words() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer((x + self.shift).detach()).sum()

    (note,) = (one for one in trace_model(source(Shifted, (WIDTH,))).notes if "no gradient" in one)
    assert note.startswith("no gradient reaches the model's own parameters: ")
