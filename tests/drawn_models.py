"""Random small models: `Drawn(number)` has the same structure everywhere, made of what people build models of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointFunction, checkpoint

WIDTH, LENGTH, BATCH = 6, 3, 2
POWER_METHOD = parametrizations._SpectralNorm._power_method


class Scale(nn.Module):
    """Parameters used directly, of odd shapes, some without dimensions and some frozen."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        shapes = [(), (1,), (WIDTH,), (LENGTH, 1), (1, 1, WIDTH)]
        self.factors = nn.ParameterList(
            nn.Parameter(torch.rand(shape) + 0.5, requires_grad=draw.random() < 0.8)
            for shape in draw.choices(shapes, k=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same, as of all pieces."""
        for factor in self.factors:
            x = x * factor
        return x


class Normed(nn.Module):
    """Statistics over the batch."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=draw.random() < 0.7, momentum=0.1 if draw.random() < 0.9 else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Running(nn.Module):
    """A running mean, changed in place or assigned anew, in training mode only or always."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.in_place, self.always = draw.random() < 0.5, draw.random() < 0.5
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=draw.random() < 0.8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            new = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            if self.in_place:
                self.mean.copy_(new)
            else:
                self.mean = new
            self.calls += 1
        return x - self.mean.clone()


class Positions(nn.Module):
    """An embedding that is added, frozen or not."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH + 2, WIDTH)
        self.table.requires_grad_(draw.random() < 0.6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(LENGTH))


class Attention(nn.Module):
    """Attention of PyTorch, which reads its output layer's parameters without calling it."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=draw.random() < 0.7, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer, which holds its parameters in a list too."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.layer = draw.choice([nn.GRU, nn.LSTM])(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


class Shared(nn.Module):
    """A layer under two names, called for each; or two layers with one weight."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first if draw.random() < 0.5 else nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class InPlace(nn.Module):
    """Changes what its layers return."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += 0.5
        return self.act(y) + x


class Partly(nn.Module):
    """A layer with one of its parameters frozen, and one whose output no gradient comes to."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        draw.choice([self.layer.weight, self.layer.bias]).requires_grad_(False)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen = self.aside(y).detach()
        return y


class Fixed(nn.Module):
    """A layer that runs without gradients."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.is_frozen = draw.random() < 0.5
        self.layer.requires_grad_(not self.is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x)
        return x + y


def _one_power_iteration(spectral: nn.Module, weight: Tensor, count: int) -> None:
    """Begin with one where PyTorch makes 15, which took a sixth of the time of drawn loops."""
    POWER_METHOD(spectral, weight, 1)


class Spectral(nn.Module):
    """A layer whose weight is computed."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        parametrize = draw.choice([parametrizations.spectral_norm, parametrizations.weight_norm])
        with mock.patch.object(parametrizations._SpectralNorm, "_power_method", _one_power_iteration):
            self.layer = parametrize(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear(draw: Random) -> nn.Module:
    """Return a plain layer."""
    return nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)


def norm(draw: Random) -> nn.Module:
    """Return a normalization, with parameters or without."""
    return draw.choice([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False), nn.RMSNorm(WIDTH)])


def mlp(draw: Random) -> nn.Module:
    """Return two layers with an activation."""
    hidden = draw.choice([4, 7, 12])
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))


PIECES: Sequence[Callable[[Random], nn.Module]] = (
    linear, linear, mlp, mlp, norm, Scale, Normed, Running, Positions, Attention, Recurrent, Shared, InPlace, Partly,
    Fixed, Spectral,
)  # fmt: skip


class Block(nn.Module):
    """Pieces one after the other, in one of several forms."""

    FORMS = (
        "plain",
        "residual",
        "residual",
        "twice",
        "tuple",
        "dict",
        "checkpointed",
        "run back apart",
        "keyword",
        "nested",
    )

    def __init__(self, draw: Random, pieces: Sequence[Callable[[Random], nn.Module]], form: str) -> None:
        super().__init__()
        self.form = form
        self.body = nn.ModuleList(piece(draw) for piece in pieces)
        if form == "nested":
            self.inner = Block(draw, pieces, "residual")

    def run(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        for piece in self.body:
            x = piece(x)
        return x

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        """(batch, LENGTH, WIDTH) -> the same, alone or in something."""
        match self.form:
            case "residual":
                return x + self.run(x)
            case "twice":
                return self.run(torch.tanh(self.run(x)))
            case "tuple":
                return self.run(x), [x]
            case "dict":
                return OrderedDict(x=self.run(x), none=None)
            case "checkpointed":
                return checkpoint(self.run, x, use_reentrant=False)
            case "run back apart":  # as by an autograd function of the user's
                return super(CheckpointFunction, CheckpointFunction).apply(self.run, True, x)
            case "nested":
                return self.inner(self.run(x))
        return scale * self.run(x)


@dataclass
class Heads:
    """What no pytree knows."""

    main: Tensor
    others: list[Tensor]


class Drawn(nn.Module):
    """Blocks, alike or not, between an embedding and several heads."""

    def __init__(self, number: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = Random(number)
        self.number = number
        self.takes_tokens = draw.random() < 0.4
        self.embed = nn.Embedding(9, WIDTH) if self.takes_tokens else nn.Linear(WIDTH, WIDTH)
        some = [draw.choices(PIECES, k=draw.randint(1, 3)) for _ in range(2)]
        self.blocks = nn.ModuleList(
            Block(draw, some[draw.random() < 0.3], draw.choice(Block.FORMS)) for _ in range(draw.randint(1, 3))
        )
        self.again = draw.random() < 0.2
        """Whether the first block is called once more at the end."""
        self.has_long_residual = draw.random() < 0.3
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, draw.choice([1, 3, WIDTH])) for _ in range(draw.randint(1, 3)))
        if self.takes_tokens and draw.random() < 0.5:
            self.heads[0] = nn.Linear(WIDTH, 9, bias=draw.random() < 0.5)
            self.heads[0].weight = self.embed.weight
        if draw.random() < 0.3:
            self.unused = nn.Linear(WIDTH, 2)
        self.root = nn.Parameter(torch.rand(WIDTH)) if draw.random() < 0.3 else None
        self.temperature = nn.Parameter(torch.tensor(0.7)) if draw.random() < 0.3 else None
        self.register_buffer("mask", torch.rand(WIDTH) + 0.5)
        self.output = draw.choice(["tensor", "tuple", "dict", "dataclass"])
        self.can_skip = draw.random() < 0.3
        self.skipped: int | None = None
        """Index of a block that is left out."""
        self.views = draw.random() < 0.5
        """Whether it returns views of what its heads return."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if dtype != torch.float32:
            self.to(dtype)

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        tokens = self.takes_tokens
        return (
            torch.randint(9, (batch, LENGTH)) if tokens else torch.randn(batch, LENGTH, WIDTH, dtype=self.mask.dtype),
        ), {}

    def features(self, x: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) or inputs (batch, LENGTH, WIDTH) -> (batch, LENGTH, WIDTH)."""
        x = start = self.embed(x) * self.mask
        if self.root is not None:
            x = x + self.root
        for index, block in enumerate([*self.blocks, *(self.blocks[:1] if self.again else [])]):
            if index == self.skipped:
                continue
            y = block(x, scale=0.5) if block.form == "keyword" else block(x)
            x = y[0] if isinstance(y, tuple) else y["x"] if isinstance(y, dict) else y
        x = self.norm(x + start if self.has_long_residual else x)
        return x if self.temperature is None else x * self.temperature

    def forward(self, x: Tensor) -> Any:
        """As `features` takes them -> the heads' outputs."""
        x = self.features(x)
        first, *others = [head(x).transpose(0, 1) if self.views else head(x) for head in self.heads]
        forms = {
            "tensor": first,
            "tuple": (first, others),
            "dict": {"main": first, "others": others},
            "dataclass": Heads(first, others),
        }
        return forms[self.output]

    def __repr__(self) -> str:
        """Say also what the modules do not show."""
        traits = ("again", "has_long_residual", "output", "views", "can_skip", "root", "temperature")
        shown = [f"{name}={str(getattr(self, name)).splitlines()[0]}" for name in traits]
        return f"{super().__repr__()}\n{', '.join([block.form for block in self.blocks] + shown)}"


def outputs_of(output: Any) -> list[Tensor]:
    """Return the tensors in any form of output, the first head's first."""
    match output:
        case Tensor():
            return [output]
        case tuple():
            return [output[0], *output[1]]
        case dict():
            return [output["main"], *output["others"]]
        case Heads():
            return [output.main, *output.others]
    raise TypeError(output)
