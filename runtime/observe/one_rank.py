"""One rank of any number on a real device: its training steps, with tensors that hold data and are computed with.

    with one_rank(script, schedule, device) as step:
        step()

As in a dry run (`runtime.observe.dry_run`) the process group is PyTorch's fake one, which sends nothing, and windows of
one-sided communication are tensors that nobody shares.  So on one GPU its allocator, its kernels and its clock tell
what this rank would take, but for communication; windows come out of the allocator, as predictions count.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runtime.apply_schedule import apply_schedule
from runtime.observe.dry_run import Script, fake_world
from runtime.odc import choose_transport
from runtime.odc.dry_run_windows import DryRunTransport
from runtime.optimizers import as_priced
from runtime.schedule import Schedule
from runtime.sharded_model import ShardedModel
from runtime.step.gradient_accumulation import Accumulation
from runtime.torch_compat import held_tensor

Step = Callable[[], None]
"""Runs a training step."""


@contextmanager
def one_rank(script: Script, schedule: Schedule, device: torch.device, rank: int = 0) -> Iterator[Step]:
    """Yield what runs one training step of a rank of the schedule's world: all micro-batches, and the optimizer.

    Weights are random numbers, no constructor's: making those takes longer than the steps.  There must be no process
    group yet.  Raises what the model or its wrapping raise, and OsdpError for what the runtime refuses.
    """
    with fake_world(schedule.world_size, rank), _windows_on(device):
        training = _Training(script, schedule, device)
        try:
            yield training.step
        finally:
            # The caller still has the step, and what holds the process group must be gone before it.
            vars(training).clear()
            gc.collect()


class _Training:
    """A model in training on this rank."""

    def __init__(self, script: Script, schedule: Schedule, device: torch.device) -> None:
        self._script, self._micro_batches = script, schedule.accumulation
        with script.building(), torch.device("meta"):
            self._model = script.build()
        sharded = apply_schedule(self._model, schedule, device)
        _fill(sharded)
        parameters = dict(sharded.named_parameters("", recurse=True, remove_duplicate=True))
        self._optimizer = as_priced(script.optimizer)(parameters.values())
        self._accumulation = Accumulation(sharded, schedule.accumulation)
        inputs = script.feed(self._model, script.micro_batch)
        self._inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)

    def step(self) -> None:
        """Run all micro-batches, and the optimizer."""
        for _ in range(self._micro_batches):
            with self._script.answering():
                self._train()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _train(self) -> None:
        """Run one micro-batch forward and, if anything is trained, backward."""
        args, kwargs = self._inputs
        output = self._accumulation.run(*args, **kwargs)
        if any(parameter.requires_grad for parameter in self._model.parameters()):
            self._script.find_loss(output).backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def _fill(sharded: ShardedModel) -> None:
    """Give values to what is uninitialised: kernels of numbers that are none may take another time."""
    for parameter in sharded.resting.values():
        held_tensor(parameter).normal_(std=0.02)
    for buffer in sharded.module.buffers():
        buffer.zero_()


@contextmanager
def _windows_on(device: torch.device) -> Iterator[None]:
    """Make windows of a dry run of the device's memory."""

    class OnDevice(DryRunTransport):
        device_type = device.type

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.published = [one.to(device) for one in self.published]
            self.accumulated = [one.to(device) for one in self.accumulated]

    with patch.object(choose_transport, "DryRunTransport", OnDevice):
        yield
