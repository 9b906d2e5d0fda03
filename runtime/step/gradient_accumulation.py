"""Gradient accumulation: strategies that reduce once per step must know the step's last micro-batch.

Unless the user marks it with `no_sync()`, the plan's number of micro-batches decides: every M-th
backward reduces.  If the optimizer steps or gradients are clipped before, what waits is reduced then;
where the user has put all micro-batches into `no_sync()`, that is refused.

Micro-batches count when their backward begins, so a forward without one (evaluation, whatever the
mode) does not.  Outputs of the model tell that first, one micro-batch for each forward; and so do units, where a
backward comes by none of these: by what a method, a part of the model or a hook returned, or an object that nobody can
look into.  That is one micro-batch for each backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from profiler.errors import OsdpError
from profiler.nested_tensors import tensors_in
from runtime.autograd_compat import in_backward, is_differentiated, is_exporting, without_transforms
from runtime.local_shards import LocalShard
from runtime.module_outputs import refuse_double_backward
from runtime.sharded_model import ShardedModel
from runtime.step.optimizer_hooks import watch_optimizers
from runtime.step.replaced_gradients import average_replaced
from runtime.step.torch_clipping import watch_clipping
from runtime.step.ungathered_parameters import naming_sharded_parameters
from runtime.step.unreachable_gradients import check_hooks, watch_gradients

TO_TRACE = "load model.full_state_dict() into the model as it was before OSDP(...), and give that"
"""What to do where a model is to be exported."""


class Accumulation:
    """Counts micro-batches of one model, tells it when to reduce, and cleans up before each forward."""

    def __init__(self, sharded: ShardedModel, micro_batches: int) -> None:
        self.sharded, self.micro_batches = sharded, micro_batches
        self.done = 0
        """Micro-batches of the step whose backward has begun, its last left out."""
        self.pushed = 0
        """Micro-batches whose backward has begun since ranks last synchronized (`odc`)."""
        self.once_per_step = any(unit.reduces_in_last_backward for unit in sharded.units)
        """Whether a reduction waits for the backward of a step's last micro-batch."""
        self.explicit = False
        """Whether the user says, by `no_sync` or `sync`, when to reduce."""
        self._postpones = False
        self._in_backward = False
        """Whether a backward has begun and not ended; at a forward: it failed."""
        self._counts_unseen = False
        """Whether that was counted though no output of a forward has told of it yet."""
        for unit in sharded.units if self.once_per_step or sharded.finishes_in_optimizer_step else ():
            unit.watch_backward(self._reach_unit)
        watch_optimizers(self, sharded.resting.values(), sharded.replaced)
        watch_clipping(self)
        watch_gradients(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the reduction of gradients to a later micro-batch."""
        before = self._postpones
        self._postpones = self.explicit = True
        try:
            yield
        finally:
            self._postpones = before

    def sync(self) -> None:
        """Make the next micro-batch the last of its step, whatever the plan says."""
        self.explicit = True

    def discard(self, set_to_none: bool = True) -> None:
        """Discard the step: its micro-batches and the gradients that wait to be reduced.

        Unless `set_to_none` these are completed first, a collective call: only then is it known which parameters have
        any, to be set to zero, and which have none.
        """
        if self._waits_apart and not set_to_none and not self._in_backward:
            self._reduce()
            self._finish()
        is_unfinished = self._in_backward or (self.done and self.once_per_step)
        for unit in self.sharded.units:
            if is_unfinished:
                unit.reset()
            else:
                unit.discard_gradients(self.pushed > 0)
        self.done, self.pushed = 0, 0
        self.explicit = self._in_backward = self._counts_unseen = False

    def before_zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Discard what an optimizer cannot see of the gradients that it clears, in the middle of a step.

        Raises OsdpError if that takes a collective call, or gradients that it does not clear.
        """
        if self._in_backward and not in_backward():  # it failed, and the loop goes on without this batch
            self.discard()
        if self._accumulates_apart and not any(unit.has_accumulated for unit in self.sharded.units):
            self.pushed = 0  # of layers that were frozen, or gradients of inputs alone
        if not (self._waits_apart or (self.done and self.once_per_step)):
            return
        cleared = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in self.sharded.resting.values() if parameter.requires_grad]
        others = sum(id(parameter) not in cleared for parameter in trained)
        if self._waits_apart and (others or self._accumulates_apart):
            what = "optimizer.zero_grad() cannot clear gradients that wait to be reduced"
            got = f"{others} of {len(trained)} parameters of another optimizer" if others else "gradients of all ranks"
            advice = "call model.zero_grad() on all ranks: it discards the step"
            raise OsdpError(what, got=got, expected="the end of a step", advice=advice)
        if not others:
            self.discard(set_to_none)

    @property
    def _accumulates_apart(self) -> bool:
        """Whether gradients are outside of `.grad` until ranks meet, in the optimizer's step."""
        return any(unit.accumulates_apart for unit in self.sharded.units)

    @property
    def _waits_apart(self) -> bool:
        """Whether there are gradients of the step outside of `.grad`."""
        pushed = self.pushed and self._accumulates_apart
        return bool(pushed or (self.done and self.once_per_step and not self.sharded.schedule.by_ddp))

    def finish_gradients(self) -> None:
        """Complete this step's gradients, before they are read. A collective call.

        Raises OsdpError if gradients of the model are not all reduced, and PeerLost, naming ranks, if some
        do not take part.
        """
        self._complete_reduction()
        self._finish()
        average_replaced(self.sharded)

    def _finish(self) -> None:
        if self.sharded.finishes_in_optimizer_step:
            self.sharded.finish_gradients(self.pushed)
            self.pushed = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, prepared for the backward that follows where there can be one."""
        if not torch.is_grad_enabled():
            return self.infer(self.sharded.module, *args, **kwargs)
        if self._in_backward and not in_backward():  # it failed; else a checkpoint around the model runs it again
            self.discard()
        check_hooks(self.sharded)
        self._check_registered()
        self.sharded.reshard()  # the last forward's backward may never have come, and values have changed
        postponed = self._postpones
        with naming_sharded_parameters(self.sharded.module):
            output = self.sharded.module(*args, **kwargs)
        if not any(without_transforms(tensor).requires_grad for tensor in tensors_in(output)):  # of a frozen model
            self.sharded.reshard()
        self._count_backward(output, postponed)
        return output

    def infer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what no backward follows, and leave nothing gathered: values may change before the next.

        Not in inference mode: what is gathered there for the first time could never be trained.
        """
        self._check_registered()
        self.sharded.reshard()
        with torch.inference_mode(False), torch.no_grad(), naming_sharded_parameters(self.sharded.module):
            output = function(*args, **kwargs)
        self.sharded.reshard()
        return output

    def _count_backward(self, output: Any, postponed: bool) -> None:
        """Count the micro-batch when its backward begins; `postponed`: the user says that it is not its step's last.

        Of several backwards through it, as for several losses, each is ended.
        """
        counted = False

        def count(gradient: Tensor) -> None:
            nonlocal counted
            if not self._in_backward:
                self._begin_backward()
            if not (counted or self._counts_unseen):
                self._count(postponed)
            counted, self._counts_unseen = True, False

        for tensor in map(without_transforms, tensors_in(output)):
            # A change in place gives a view another history, but not the tensor that it is a view of.
            for one in (tensor, tensor._base):
                if one is not None and one.requires_grad:
                    one.register_hook(count)  # type: ignore[no-untyped-call]

    def _reach_unit(self) -> None:
        """Count a backward that begins with a unit."""
        if not self._in_backward:
            self._begin_backward()
            self._count(self._postpones)
            self._counts_unseen = True

    def _begin_backward(self) -> None:
        if not self.sharded.schedule.by_ddp:
            refuse_double_backward()
        self._in_backward = True
        Variable._execution_engine.queue_callback(self._end_backward)

    def _count(self, postponed: bool) -> None:
        """Count a micro-batch whose backward begins; `postponed`: the user says that it is not its step's last."""
        last = not postponed and (self.explicit or self.done + 1 >= self.micro_batches)
        for unit in self.sharded.units if self.once_per_step else ():
            unit.set_requires_all_reduce(last)
        self.done, self.pushed = 0 if last else self.done + 1, self.pushed + 1
        self.explicit = self.explicit and not last

    def _end_backward(self) -> None:
        self._in_backward = self._counts_unseen = False
        for unit in self.sharded.units:
            unit.end_backward()
        if not self.done and not self._accumulates_apart:  # else ranks may run different numbers of micro-batches
            self._finish()

    def before_step(self, has_closure: bool) -> None:
        """Reshard parameters, whose values the optimizer's step changes, and complete the gradients.

        Raises OsdpError if gradients of this model are not all reduced, or a closure would make further ones.
        """
        if self.sharded.schedule.by_ddp and in_backward():
            what = "an optimizer steps in a backward, before gradients are averaged over ranks"
            advice = "step after loss.backward(), or plan with another pin than *=replicate, such as *=shard"
            raise OsdpError(what, expected="a step after the backward", advice=advice)
        self._complete_reduction()
        if has_closure and self._accumulates_apart:
            what = "an optimizer's step cannot run a closure under odc, whose ranks synchronize before the step"
            raise OsdpError(what, advice="run forward and backward before step(), or plan without odc")
        self.sharded.reshard()
        self.sharded.check_registered()
        self.finish_gradients()

    def _complete_reduction(self) -> None:
        """Reduce what waits for a last micro-batch that does not come. Raises OsdpError if all were in `no_sync`."""
        if self.explicit and self.done and self.once_per_step:
            count = "1 micro-batch" if self.done == 1 else f"{self.done} micro-batches"
            what = "gradients are not all reduced: all micro-batches of this step ran in no_sync()"
            mark = "run the last one outside of no_sync(), or call model.sync() before it"
            advice = f"{mark}; model.zero_grad() discards the step"
            raise OsdpError(what, got=count, expected="one outside of no_sync()", advice=advice)
        self._reduce()

    def _reduce(self) -> None:
        if self.done and self.once_per_step:
            for unit in self.sharded.units:
                unit.complete_reduction()
            self.done = 0

    @property
    def local_shards(self) -> Sequence[LocalShard]:
        """What this rank holds."""
        return self.sharded.local_shards

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.sharded.device

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients of the step so far are complete."""
        waits_for_step = self.sharded.finishes_in_optimizer_step and self.pushed > 0
        return not (waits_for_step or (self.done and self.once_per_step))

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        """Return which of these, by identity, the model has beside the parameters that rest.

        They were gathered by a forward, or added later.
        """
        registered = set(map(id, self.sharded.module.parameters())) & parameters.keys()
        return registered | self.sharded.gathered(parameters)

    def _check_registered(self) -> None:
        """Raise OsdpError where modules would not compute with what somebody has put in the places of parameters."""
        if not self.sharded.schedule.by_ddp:
            if is_exporting():
                raise OsdpError("torch.export takes no sharded model", expected="a plain module", advice=TO_TRACE)
            self.sharded.check_registered()
            if is_differentiated():
                what = "torch.func.grad, vjp, jvp and jacrev do not run through sharded layers"
                advice = "call backward() or torch.autograd.grad, or plan with the pin *=replicate in fp32"
                raise OsdpError(what, advice=advice)

    def after_step(self) -> None:
        """Publish the parameters that the optimizer has changed."""
        for unit in self.sharded.units:
            unit.publish()
