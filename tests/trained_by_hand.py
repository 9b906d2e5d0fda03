"""Trainings of the examples for Hugging Face's loops, by hand in one process, with all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

RANKS, STEPS, MAX_NORM = 2, 10, 0.5


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> tuple[float, float]:
    """Step by the gradient of a loss, clipped; return the loss and the norm before."""
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def next_token_loss(model: Any, picked: list[dict[str, Tensor]], smoothing: float = 0.0) -> Tensor:
    """Return the mean over all tokens that are to be learnt."""
    tokens, labels = (torch.stack([one[name] for one in picked]) for name in ("input_ids", "labels"))
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=smoothing)


def decoder_by_hand(build: Callable[[], nn.Module], samples: Callable[[int], Any]) -> dict[str, Any]:
    """Train the decoder of the Trainer's example: 8 samples a step, of 32 in turn."""
    model, data, held_out = build(), samples(32), samples(8)
    decayed = [one for name, one in model.named_parameters() if "norm" not in name]
    others = [one for name, one in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, told, evaluated = torch.optim.AdamW(groups), [], {}
    for step in range(STEPS):
        loss = next_token_loss(model, [data[(8 * step + index) % 32] for index in range(8)])
        told.append(stepped(model, optimizer, loss, 1e-2 * (1 - step / STEPS)))
        if step in (4, 9):
            with torch.no_grad():
                parts = [next_token_loss(model, held_out[start : start + 4]) for start in (0, 4)]
            evaluated[step + 1] = torch.stack(parts).mean().item()
    return {"told": told, "evaluated": evaluated, "parameters": model.state_dict()}


def adder_by_hand(build: Callable[[], nn.Module], samples: Callable[[int, int], Any]) -> dict[str, Any]:
    """Train the network of accelerate's example: 8 new samples a step; its schedule counts each rank's steps."""
    model, data = build(), samples(8 * STEPS, 1)
    optimizer, told, evaluated = torch.optim.AdamW(model.parameters()), [], {}

    def mean_loss(picked: list[dict[str, Tensor]]) -> Tensor:
        digits, labels = (torch.stack([one[name] for one in picked]) for name in ("digits", "labels"))
        return nn.functional.cross_entropy(model(digits, labels)["logits"], labels)

    for step in range(STEPS):
        lr = 2e-2 / (1 + 0.1 * RANKS * step)
        told.append(stepped(model, optimizer, mean_loss(data[8 * step : 8 * step + 8]), lr))
        if step in (4, 9):
            with torch.no_grad():
                evaluated[step + 1] = mean_loss(samples(8, 2)).item()
    return {"told": told, "evaluated": evaluated, "parameters": model.state_dict()}


def in_autocast_by_hand(model: Any, data: Any, lr: float) -> list[dict[str, Tensor]]:
    """Return the parameters before, and after steps of a batch of two samples on each rank, with autocast and without.

    A rank's batch is a product of its own, whose gradient is rounded before the ranks' mean.
    """
    start, ends = {name: one.clone() for name, one in model.state_dict().items()}, []
    for enabled in (True, False):
        model.load_state_dict(start)
        for first in range(0, len(data), 2 * RANKS):
            for one in (first, first + 2):
                batch = {key: torch.stack([data[one][key], data[one + 1][key]]) for key in data[one]}
                share = _learnt(data[one : one + 2]) / _learnt(data[first : first + 2 * RANKS])
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    loss = model(**batch)["loss"] * share
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
                    parameter.grad = None
        ends.append({name: one.clone() for name, one in model.state_dict().items()})
    return [start, *ends]


def _learnt(picked: list[dict[str, Tensor]]) -> int:
    """Return how many labels the loss is a mean over: digits' sums, or tokens after the first."""
    return sum(int((one["labels"].reshape(-1)[int(one["labels"].dim()) :] != -100).sum()) for one in picked)
