"""Adapters on quantised bases, which come in classes of their own: as bitsandbytes' and as torchao's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from toys import Toy, batch_of, cluster_of, graph_of, plan_of, refusal, seeded

from planner.cost.workload import Workload

WIDTH = 32


class Scales:
    """What a packed parameter knows beside its codes."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Packed(nn.Parameter):
    """Codes of eight bits, as in a subclass of nn.Parameter; the scale of each row is an attribute of an attribute."""

    scales: Scales

    @staticmethod
    def of(weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        made = Tensor._make_subclass(Packed, ((weight / scale).round() + 128).to(torch.uint8), False)
        made.scales = Scales(scale)
        return made


class Wrapped(Tensor):
    """Codes and scales in a tensor that has no data of its own, and is float32 to whoever looks."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @staticmethod
    def of(weight: Tensor) -> nn.Parameter:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return nn.Parameter(Wrapped((weight / scale).round().to(torch.int8), scale), requires_grad=False)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return Wrapped(*(func(one, **{**kwargs, "dtype": None} if kwargs else {}) for one in args[0].tensors()))
        if func is torch.ops.aten.copy_.default:
            for mine, other in zip(args[0].tensors(), args[1].tensors(), strict=True):
                mine.copy_(other)
            return args[0]
        plain = tree_map(lambda one: one.codes * one.scale if isinstance(one, Wrapped) else one, (args, kwargs))
        return func(*plain[0], **plain[1])

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scale


class Base(nn.Module):
    """A frozen linear layer of quantised weights."""

    def __init__(self, quantise: Any) -> None:
        super().__init__()
        self.weight = quantise(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        weight = self.weight
        if isinstance(weight, Packed):
            weight = (weight.data.float() - 128) * weight.scales.scale
        return F.linear(x.to(weight.dtype), weight).to(x.dtype)  # whatever x is computed in


class Adapter(nn.Module):
    """A base and what is trained on top."""

    def __init__(self, quantise: Any) -> None:
        super().__init__()
        self.base, self.down, self.up = Base(quantise), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same."""
        return (x + self.base(x) + self.up(self.down(x))).tanh()


class Adapted(Toy):
    """Two blocks and a head."""

    def __init__(self, quantise: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter(quantise) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 5, WIDTH),), {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, width) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


def build(style: str) -> nn.Module:
    """Return a model whose base is packed or wrapped."""
    return Adapted({"packed": Packed.of, "wrapped": Wrapped.of}[style])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, style: str, ranks: list[int], number: int) -> None:
    """Train on the batches of these ranks."""
    sample = build(style)
    sum(model(*batch_of(sample, rank, number)[0]) / len(ranks) for rank in ranks).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, folder: Path) -> dict[str, str]:
    """Train adapters as one process does, with strategies in turn; return what is refused."""
    from osdp import OSDP

    said = {}
    for turn, style in enumerate(("wrapped", "packed")):
        alone = seeded(lambda: build(style))  # noqa: B023
        optimizer = torch.optim.Adam([one for one in alone.parameters() if one.requires_grad], lr=1e-2)
        for number in range(3):
            step(alone, optimizer, style, [0, 1], number)
        wanted = alone.state_dict()
        for strategy in some(("shard", "replicate", "owner"), 2, turn):
            model = OSDP(seeded(lambda: build(style), seed=3 + 5 * rank), plan_of(build(style), strategy, ranks=(1, 2)))  # noqa: B023
            kind = {"packed": Packed, "wrapped": Wrapped}[style]
            assert all(type(block.base.weight) is kind for block in model.module.blocks), strategy
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for number in range(3):
                step(model, optimizer, style, [rank], number)
            got = model.full_state_dict(rank0_only=False)
            assert list(got) == list(wanted)
            for name, value in got.items():
                if style == "wrapped" and "base" in name:
                    assert type(value) is Wrapped
                    for mine, other in zip(value.tensors(), wanted[name].tensors(), strict=True):
                        assert torch.equal(mine, other)
                else:
                    torch.testing.assert_close(value, wanted[name].data, rtol=1e-4, atol=1e-5)
            other = OSDP(seeded(lambda: build(style), seed=7), plan_of(build(style), "shard", ranks=(1, 2)))  # noqa: B023
            other.load_state_dict(got)
            args = batch_of(alone, 9)[0]
            if style == "wrapped":  # else the scales are an attribute, which no state dict has
                torch.testing.assert_close(other(*args), alone(*args), rtol=1e-4, atol=1e-5)
            model.save_checkpoint(folder / f"{style}-{strategy}", optimizer)
            model.load_checkpoint(folder / f"{style}-{strategy}", optimizer)
        if style == "wrapped":
            said["save_pretrained"] = refusal(lambda: model.save_pretrained(folder / "pretrained"))  # noqa: B023
        said[style] = refusal(lambda: OSDP(lambda: build(style), plan_of(build(style), ranks=(1, 2))))  # noqa: B023
    return said


def test_adapters_on_quantised_bases_train(tmp_path: Path) -> None:
    for said in run_ranks(train, 2, tmp_path):
        assert "blocks.0.base.weight" in said["save_pretrained"]
        for style in ("packed", "wrapped"):
            assert {"packed": "blocks.0.base.weight", "wrapped": "class Wrapped"}[style] in said[style]
            assert "give OSDP the module itself" in said[style]


@pytest.mark.parametrize("style", ["packed", "wrapped"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_they_are_priced_as_they_are(style: str, precision: str) -> None:
    """A byte for each of 1,024 codes and four for each of 32 scales, in fp32 and in bf16 alike."""
    graph = graph_of(build(style), precision)
    assert not any("base" in operator.name for operator in graph.operators)
    assert [(one.shape, one.element_bytes) for one in graph.outside] == [((WIDTH, WIDTH), 1), ((WIDTH, 1), 4)] * 2
    assert Workload(cluster_of(1, 2), "adam", precision, 1, outside=graph.outside).outside_bytes == 2 * (1024 + 512)
    (note,) = (note for note in graph.notes if "as they are" in note)
    assert f"blocks.0.base.weight and 1 more of class {style.capitalize()}" in note
