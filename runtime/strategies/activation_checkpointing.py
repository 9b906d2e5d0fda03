"""Recomputation of blocks (activation checkpointing), and their compilation.

A block that is one unit is gathered around all that happens here: its forward is replaced, and
`fully_shard`'s hooks stay outside.  Where a block has several units, they are gathered again when
its forward runs again, and kept from there to their backward, so that each is gathered twice per
micro-batch and not three times.

A forward that runs again must do what it did, and leave nothing behind.  So lists that it is handed are what they were
(`profiler.rerun_arguments`); buffers that it changes (statistics of BatchNorm, vectors of spectral norms) have again
the values that they had before it, and keep those that it gave them, as do plain attributes
(`profiler.remembered_attributes`); and in the first step its matrix products, and how large they are, are
compared: a block that remembers something else is refused.

Recomputed selectively, a block keeps what its matrix products and attention return, and takes it up again instead of
computing it (`profiler.selective_recomputation`).  Offloaded, its input is on the host meanwhile
(`runtime.strategies.offloaded_input`).
"""

import warnings
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from profiler.early_stops import is_early_stop
from profiler.errors import OsdpError
from profiler.remembered_attributes import RememberedAttributes
from profiler.rerun_arguments import Forward, handed_alike
from profiler.selective_recomputation import KeptOutputs, is_kept, is_product
from runtime.autograd_compat import is_vmapped
from runtime.odc.dry_run_windows import is_dry_run
from runtime.parameter_places import ParameterSite
from runtime.sharded_model import ShardedModel
from runtime.strategies.offloaded_input import Offloading
from runtime.torch_compat import is_fake

Buffers = dict[ParameterSite, Tensor]
States = dict[ParameterSite, tuple[int, int]]


def recompute(sharded: ShardedModel, compile_backend: str | None) -> None:
    """Let blocks run again in backward as scheduled, and compile those that are one unit each.

    Compiled blocks run again whole: what a compiled forward computes cannot be kept one by one.
    """
    model, schedule = sharded.module, sharded.schedule
    if compile_backend is not None and schedule.selective:
        warnings.warn("compiled blocks are recomputed whole where the plan says selectively: slower", stacklevel=2)
    units = {path for unit in schedule.units for path in unit.modules if len(unit.modules) == 1}
    if compile_backend is not None:
        for path in sorted(units):
            block = model.get_submodule(path)
            if path and next(block.children(), None) is not None:
                vars(block)["forward"] = torch.compile(block.forward, backend=compile_backend)
    offloading = Offloading(sharded.device, schedule.offloaded)
    for name in schedule.recomputed:
        block = model.get_submodule(name)
        checkpointed = _Checkpointed(name, block, sharded, offloading, name in units, compile_backend is not None)
        vars(block)["forward"] = checkpointed.run


class _Checkpointed:
    """A block whose forward runs again in backward."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        sharded: ShardedModel,
        offloading: Offloading,
        is_unit: bool,
        is_compiled: bool,
    ) -> None:
        self.name, self.block, self.sharded, self.is_unit = name, block, sharded, is_unit
        self.offloading = offloading
        self.forward: Forward = block.forward
        self.is_selective = name in sharded.schedule.selective and not is_compiled
        """Whether it keeps what matrix products and attention return."""
        self.is_checked = is_compiled
        """Whether a forward was seen to run again as it did; a compiled one cannot be watched."""
        self.changed: dict[tuple[bool, ...], dict[ParameterSite, bool]] = {}
        """Buffers that a forward changes, and whether they count that, by which of the modules are in training mode."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, to be run again in backward if there is one."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if is_vmapped():
            advice = "plan without recomputation, or run it on a batch"
            raise OsdpError(f"{self.name} is recomputed, and runs under torch.func.vmap", advice=advice)
        mode = tuple(module.training for module in self.block.modules())
        before, states = self._copies(self.changed.get(mode)), self._states()
        again, forward = _Again(self, before), self.forward
        offloaded = self.offloading.offload(self.name, args, kwargs)
        if offloaded is not None:
            forward, (args, kwargs) = offloaded.into(forward), offloaded.without(args, kwargs)
        forward, args, kwargs = handed_alike(forward, args, kwargs)
        if self.sharded.device.type != "cpu":
            forward, args = _with_device(forward, args, self.sharded.device)
        # Stopped early, the last unit's forward would not reach the hook that ends it.
        with set_checkpoint_early_stop(self.is_unit):
            output = checkpoint(
                forward, *args, use_reentrant=False, context_fn=lambda: (again.forward(), again), **kwargs
            )
        again.remembered.end()
        if offloaded is not None:
            offloaded.let_go(self.name)
        self._let_go_of_unchanged(mode, before, states)
        return output

    def _let_go_of_unchanged(self, mode: tuple[bool, ...], before: Buffers, states: States) -> None:
        """Drop the copies of buffers that a forward has left as they were; `states` are from before it."""
        after = self._states()
        if mode not in self.changed:
            # Written with the same values is changed too: later ones may be others; `.data` changes values alone.
            counts = {site: states.get(site) != after.get(site) for site in before}
            left = {site for site, old in before.items() if not counts[site] and _same(site, old)}
            self.changed[mode] = {site: counts[site] for site in before.keys() - left}
        else:
            self._check_others(before, states, after)
        for site in [*before]:  # a cache is filled once
            if site not in self.changed[mode] or (self.changed[mode][site] and states.get(site) == after.get(site)):
                del before[site]

    def _states(self) -> States:
        """Return which tensor each buffer is, and how often it was changed."""
        sites = ((module, *item) for module in self.block.modules() for item in module.named_buffers(recurse=False))
        return {(module, name): (id(buffer), buffer._version) for module, name, buffer in sites}

    def _check_others(self, before: Buffers, states: States, after: States) -> None:
        """Raise OsdpError if a buffer of which there is no copy has changed: an earlier forward left it as it was."""
        changed = [
            site[1]
            for site, state in after.items()
            if site not in before and states.get(site) != state and not is_fake(site[0].get_buffer(site[1]))
        ]
        if changed:
            what = f"block {self.name} cannot be recomputed: some of its forwards change buffers that others leave"
            raise OsdpError(what, got=", ".join(changed), advice=f"plan with the pin {self.name}=keep")

    def _copies(self, sites: Container[ParameterSite] | None) -> Buffers:
        """Return copies of the block's buffers, or of some of them."""
        with torch.no_grad():
            return {
                (module, name): buffer.clone()
                for module in self.block.modules()
                for name, buffer in module.named_buffers(recurse=False)
                if not is_fake(buffer) and (sites is None or (module, name) in sites)
            }


def _same(site: ParameterSite, old: Tensor) -> bool:
    module, name = site
    return torch.equal(module.get_buffer(name), old)


def _with_device(forward: Forward, args: tuple[Any, ...], device: torch.device) -> tuple[Forward, tuple[Any, ...]]:
    """Return a forward and its arguments with a tensor first: `checkpoint` keeps the states of the generators of random
    numbers of the devices of positional arguments only, and a block may be handed everything by name.
    """
    return lambda _, *others, **kwargs: forward(*others, **kwargs), (torch.empty(0, device=device), *args)


class _Again(AbstractContextManager[None, bool]):
    """What surrounds a forward that runs again; there may be several backwards."""

    def __init__(self, block: _Checkpointed, before: Buffers) -> None:
        self.block, self.before = block, before
        """`before`: buffers that the forward changes, as they were."""
        self.remembered = RememberedAttributes(block.block)
        self.kept = KeptOutputs() if block.is_selective else None
        self.first = nullcontext() if block.is_checked else _Products(block.name, None)
        """What compares its matrix products, when it runs first."""
        self.stack = ExitStack()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Be in the forward when it runs first."""
        with nullcontext() if self.kept is None else _Keeping(self.kept), self.first:
            yield

    def __enter__(self) -> None:
        block = self.block.block
        inside = set(block.modules())
        for unit in self.block.sharded.units:
            if block not in unit.modules and not inside.isdisjoint(unit.modules):  # its backward comes next
                self.stack.enter_context(unit.keep_after_forward())
        for (module, name), old in self.before.items():
            # Other tensors in their places: autograd may have kept those that are there.
            self.stack.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = old.clone()
        self.stack.enter_context(self.remembered.restored())
        if self.kept is not None:
            self.stack.callback(self.kept.end)
            self.stack.enter_context(_Keeping(self.kept, again=True))
        if isinstance(self.first, _Products) and not self.block.is_checked:
            self.stack.enter_context(_Products(self.block.name, self.first))

    def __exit__(self, *error: Any) -> bool:
        self.stack.__exit__(*error)
        if not isinstance(error[1], OsdpError):
            self.block.is_checked = True
        return is_early_stop(error[1])


class _EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is never in a compiled region: compiled blocks are recomputed without."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps Dynamo out takes several microseconds of every op (torch 2.11 to 2.13)


class _Keeping(_EagerMode):
    """Keeps outputs of a forward, or, where it runs `again`, takes them up instead of computing them."""

    def __init__(self, kept: KeptOutputs, *, again: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.again = kept, again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            if not self.again:
                self.kept.note_changes(func, args, kwargs)
            return func(*args, **kwargs)
        if self.again and (before := self.kept.take(func)) is not None:
            return before
        output = func(*args, **kwargs)
        if not self.again:
            self.kept.add(func, output)
        return output


class _Products(_EagerMode):
    """Notes the matrix products and convolutions of a forward, or compares them with those of the first."""

    def __init__(self, block: str, expected: "_Products | None") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block, self.expected = block, expected
        self.seen: list[str] = []
        self.norms: list[Tensor | None] = []
        """Of what each returned; None where that has no data, or what a dry run has found in its memory."""
        self.compares_values = not is_dry_run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_product(func):
            first = output[0] if isinstance(output, (tuple, list)) else output
            self.seen.append(f"{func} -> {tuple(first.shape)}")
            self.norms.append(_norm(first) if self.compares_values else None)
            position = len(self.seen) - 1
            before = None if self.expected is None else self.expected.seen[position : position + 1]
            if before is not None and before != self.seen[position:]:
                self._refuse(self.seen[position], *before)
        return output

    def __exit__(self, error: Any, value: Any, traceback: Any) -> None:
        super().__exit__(error, value, traceback)  # type: ignore[no-untyped-call]
        if self.expected is None or isinstance(value, OsdpError):
            return
        if error is None and len(self.seen) < len(self.expected.seen):
            self._refuse("no more", self.expected.seen[len(self.seen)])
        for name, norm, before in zip(self.seen, self.norms, self.expected.norms, strict=False):
            if norm is not None and before is not None and not _is_close(norm, before):
                self._refuse(f"{name} of norm {norm.item():.6g}", f"one of norm {before.item():.6g}")

    def _refuse(self, got: str, expected: str = "no more") -> None:
        what = f"block {self.block} cannot be recomputed: its forward does something else when it runs again"
        advice = "turn off what it remembers (use_cache=False in transformers), or plan with the pin"
        raise OsdpError(what, got=got, expected=expected, advice=f"{advice} {self.block}=keep")


def _norm(tensor: Tensor) -> Tensor | None:
    """Return a norm in at least fp32, for which nothing as large as the tensor is made; None of one without data."""
    if type(tensor) is not Tensor or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


def _is_close(norm: Tensor, before: Tensor) -> bool:
    """Return whether kernels that add up in another order each time could give both."""
    return torch.allclose(norm, before, rtol=1e-3, atol=1e-30, equal_nan=True)
