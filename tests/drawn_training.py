"""A training on ranks beside the same in one process, action by action."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drawn_models import BATCH, outputs_of
from drawn_plans import Draw
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toys import seeded


@dataclass
class Side:
    """One of two trainings: of ranks, where a process has one of them, or of one process, which plays all of them."""

    models: list[Any]
    """One process has a module per rank, which share parameters but not buffers; the first is what is compared."""
    ranks: list[int]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def parameters(self, prefixes: Sequence[str]) -> list[nn.Parameter]:
        """Return the parameters whose names begin so."""
        return [one for name, one in self.models[0].named_parameters() if name.startswith(tuple(prefixes))]


class Loop:
    """A training on ranks, beside one in one process that rank 0 runs too and compares with."""

    def __init__(self, draw: Draw, rank: int, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        self.sharded = Side([self._shard(0)], [rank])
        self.alone: Side | None = None
        if rank == 0:
            module = seeded(draw.build)
            memos = ({id(parameter): parameter for parameter in module.parameters()} for _ in range(3))
            world_size = draw.ranks[0] * draw.ranks[1]
            copies = [copy.deepcopy(module, memo) for _, memo in zip(range(world_size - 1), memos, strict=False)]
            self.alone = Side([module, *copies], list(range(world_size)))
        self.made: list[tuple[str, list[tuple[Sequence[str], float]]]] = []
        """Of every optimizer its kind and the prefixes and learning rate of its groups."""
        self.frozen: list[tuple[str, bool]] = []
        """What was frozen or thawed."""
        self.saved: Any = None

    def _shard(self, again: int) -> Any:
        from osdp import OSDP

        build, plan = self.draw.build, self.draw.plan(again)
        torch.manual_seed(3)
        made = build if (self.draw.number + again) % 3 == 0 else build()
        return OSDP(made, plan, find_unused_parameters=True)

    @property
    def model(self) -> Any:
        """The sharded model."""
        return self.sharded.models[0]

    @property
    def has_windows(self) -> bool:
        """Whether ranks pull parameters and push gradients."""
        return any(unit.accumulates_apart for unit in self.model.sharded.units)

    @property
    def sides(self) -> list[Side]:
        """Both trainings, or that of the ranks only."""
        return [self.sharded] if self.alone is None else [self.alone, self.sharded]

    def batch(self, rank: int, number: int) -> tuple[Any, ...]:
        """Return the arguments of a rank's forward."""
        torch.manual_seed(1000 * number + rank)
        return self.model.module.example_inputs(BATCH)[0]

    def outputs(self, side: Side, number: int) -> list[list[Tensor]]:
        """Run forward on the batches of a number, of all ranks of a side; every other time change outputs in place."""
        pairs = zip(side.models, side.ranks, strict=True)
        found = [outputs_of(model(*self.batch(rank, number))) for model, rank in pairs]
        for output in (tensor for tensors in found for tensor in tensors if number % 2):
            output.add_(0.5)
        return found

    def compare(self, results: Sequence[Any], what: str) -> None:
        """Assert that rank 0 has the same on both sides."""
        if self.alone is not None:
            wanted, got = results
            rtol, atol = (1e-5, 1e-7) if self.draw.dtype == torch.float64 else (1e-3, 5e-4)
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation."""
        for side in self.sides:
            for model in side.models:
                model.train(mode)

    def skip(self, index: int | None) -> None:
        """Leave out this block from now on."""
        for side in self.sides:
            for model in side.models:
                (model.module if side is self.sharded else model).skipped = index

    def evaluate(self, number: int, inference: bool, method: bool) -> None:
        """Run a forward, or another method, without gradients."""
        results = []
        for side in self.sides:
            with torch.inference_mode() if inference else torch.no_grad():
                if method:
                    pairs = zip(side.models, side.ranks, strict=True)
                    made = [model.features(*self.batch(rank, number)) for model, rank in pairs]
                    results.append(made[0].clone())
                else:
                    results.append(self.outputs(side, number)[0])
        self.compare(results, "outputs without gradients")

    def give_up_forward(self, number: int) -> None:
        """Run a forward with gradients, of which nothing comes."""
        for side in self.sides:
            self.outputs(side, number)

    def train_on(self, numbers: list[int], weights: list[float], order: str, syncs: bool, share: float) -> None:
        """Run forwards, then their backwards: of the sum, or of each, in order or not, or of each one's heads."""
        results = []
        for side in self.sides:
            with nullcontext() if syncs or side is self.alone else self.model.no_sync():
                outputs = [self.outputs(side, number) for number in numbers]
                results.append([[tensor.detach().clone() for tensor in of_ranks[0]] for of_ranks in outputs])
                losses = [share * loss_of(of_ranks, weights) for of_ranks in outputs]
                for loss in {"sum": [sum(losses)], "each": losses, "reversed": losses[::-1], "heads": []}[order]:
                    if loss.requires_grad:  # not all is frozen
                        loss.backward()
                for of_ranks in outputs if order == "heads" else ():
                    heads = [share * loss_of(of_ranks, alone) for alone in one_by_one(weights)]
                    heads = [loss for loss in heads if loss.requires_grad]
                    for number, loss in enumerate(heads, 1):
                        loss.backward(retain_graph=number < len(heads))
        self.compare(results, "outputs")

    def fail_backward(self, number: int) -> None:
        """Run a backward that raises on all ranks, and discard the step."""
        for side in self.sides:
            for outputs in self.outputs(side, number):
                if outputs[0].requires_grad:
                    outputs[0].register_hook(_fail)
                    with suppress(ZeroDivisionError):
                        loss_of([outputs], [1.0, 1.0, 1.0]).backward()
            side.models[0].zero_grad()

    def give_up_step(self) -> None:
        """Discard the step."""
        for side in self.sides:
            side.models[0].zero_grad()

    def compare_gradients(self) -> None:
        """Complete gradients and compare rank 0's, and which parameters have none."""
        self.model.finish_gradients()
        for shard in self.model.sharded.local_shards if self.alone is not None else ():
            wanted, got = self.alone.models[0].get_parameter(shard.name).grad, shard.parameter.grad
            if shard.numel:
                assert (wanted is None) == (got is None), f"gradient of {shard.name}: {got}, in place of {wanted}"
                if got is not None and wanted is not None:
                    self.compare([wanted[shard.slices], shard.local(got)], f"gradient of {shard.name}")

    def clip(self, max_norm: float, norm_type: float, by_torch: bool) -> None:
        """Clip gradients by the model's method or by torch's function."""
        norms = []
        for side in self.sides:
            if side is self.sharded and not by_torch:
                norm = self.model.clip_grad_norm_(max_norm, norm_type)
            else:
                self.model.finish_gradients() if side is self.sharded else None
                norm = nn.utils.clip_grad_norm_(side.models[0].parameters(), max_norm, norm_type)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double())
        self.compare(norms, "norm")

    def make_optimizer(self, kind: str, prefixes: Sequence[str], rate: float) -> None:
        """Make a further optimizer, of the parameters whose names begin so."""
        self.made.append((kind, [(prefixes, rate)]))
        for side in self.sides:
            side.optimizers.append(_optimizer(side, *self.made[-1]))

    def add_group(self, prefixes: Sequence[str], rate: float) -> None:
        """Give the last optimizer further parameters."""
        self.made[-1][1].append((prefixes, rate))
        for side in self.sides:
            side.optimizers[-1].add_param_group({"params": side.parameters(prefixes), "lr": rate})

    def step(self, closes: str) -> None:
        """Step all optimizers, and drop gradients in one of the ways."""
        for side in self.sides:
            for optimizer in side.optimizers:
                optimizer.step()
            for one in side.optimizers if closes.startswith("optimizer") else side.models[:1]:
                one.zero_grad(set_to_none=not closes.endswith("zeros"))

    def scale(self, prefixes: Sequence[str], factor: float, by_data: bool) -> None:
        """Multiply parameters by a number, other than by an optimizer."""
        for side in self.sides:
            for parameter in side.parameters(prefixes):
                with torch.no_grad():
                    (parameter.data if by_data and not self.has_windows else parameter).mul_(factor)

    def freeze(self, prefix: str, frozen: bool) -> None:
        """Freeze or thaw parameters."""
        self.frozen.append((prefix, frozen))
        for side in self.sides:
            for parameter in side.parameters([prefix]):
                parameter.requires_grad_(not frozen)

    def save(self) -> None:
        """Keep what is learnt, as whole tensors and as this rank holds it."""
        whole, own = self.model.full_state_dict(rank0_only=False), {}
        for name, value in self.model.state_dict().items():
            own[name] = value.clone() if isinstance(value, Tensor) else value.copy_to_cpu()
        alone = [copy.deepcopy(model.state_dict()) for model in self.alone.models] if self.alone else []
        self.saved = whole, own, alone

    def restore(self, whole: bool) -> None:
        """Go back to that; whole tensors have rank 0's buffers, and fit any plan."""
        whole = whole or self.saved[1] is None
        self.model.load_state_dict(self.saved[0 if whole else 1])
        for model, state in zip(self.alone.models, self.saved[2], strict=True) if self.alone else ():
            model.load_state_dict(self.saved[2][0] if whole else state)

    def resume(self, again: int) -> None:
        """Save a checkpoint, load it under another plan, and go on with that."""
        path, old = self.folder / f"{self.draw.number}-{again}", self.model
        old.save_checkpoint(path, self.sharded.optimizers[0])
        new = self._shard(again)
        new.train(old.training)
        new.module.skipped = old.module.skipped
        self.sharded.models = [new]
        if self.saved:
            self.saved = self.saved[0], None, self.saved[2]
        for prefix, frozen in self.frozen:
            for parameter in self.sharded.parameters([prefix]):
                parameter.requires_grad_(not frozen)
        self.sharded.optimizers = [_optimizer(self.sharded, *made) for made in self.made]
        new.load_checkpoint(path, self.sharded.optimizers[0])
        if self.alone is not None:
            first, fresh = self.alone.models[0], dict(seeded(self.draw.build).named_buffers())
            saved = first.state_dict()
            with torch.no_grad():
                for model in self.alone.models:
                    for name, buffer in model.named_buffers():
                        buffer.copy_(saved[name] if name in saved else fresh[name])

    def check(self) -> None:
        """Compare all that was learnt."""
        got = self.model.full_state_dict()
        self.compare([dict(self.alone.models[0].state_dict()) if self.alone else None, got], "state")


def loss_of(outputs: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> Tensor:
    """Return the mean over ranks of some of the heads' losses, by their weights."""
    losses = [
        weight * tensor.pow(2).mean()
        for tensors in outputs
        for weight, tensor in zip(weights, tensors, strict=False)
        if weight
    ]
    return sum(losses, torch.zeros((), dtype=outputs[0][0].dtype)) / len(outputs)


def one_by_one(weights: Sequence[float]) -> list[list[float]]:
    """Return, for every weight, all of them with only that one not zero."""
    return [[weight if at == head else 0.0 for at in range(len(weights))] for head, weight in enumerate(weights)]


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _optimizer(side: Side, kind: str, groups: Sequence[tuple[Sequence[str], float]]) -> torch.optim.Optimizer:
    made = [{"params": side.parameters(prefixes), "lr": rate} for prefixes, rate in groups]
    if kind == "sgd":
        return torch.optim.SGD(made, momentum=0.5)
    return torch.optim.AdamW(made, eps=0.1, foreach=False)
