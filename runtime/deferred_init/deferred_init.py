"""Starts models that no rank ever holds whole, with the values that the ordinary constructor gives.

`record` runs a factory on the meta device and writes down what it does to tensors; `Recording.replay`
does that on the CPU, one tensor at a time. `reset` has a meta-device module fill itself again by its
modules' own `reset_parameters`. Both use up the default CPU generator exactly as the constructor does
(`reset` with the exceptions that it lists).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from profiler.computed_attributes import forget_computed
from profiler.errors import OsdpError
from profiler.plain_attributes import Replaced, plain_attributes, replaced
from runtime.deferred_init.op_recorder import OpRecorder
from runtime.deferred_init.op_tape import Ref, Tape


@dataclass(frozen=True)
class Recording:
    """A model without data, and how to make its data."""

    module: nn.Module
    """The model, with every parameter and buffer on the meta device."""
    tape: Tape
    """What its constructor did."""
    finals: Mapping[str, Ref]
    """Where parameters and buffers are on the tape, by name."""

    def replay(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full value of each parameter and buffer by its name, tied ones once; on the CPU.

        They come as soon as nothing more happens to them and in no promised order. A tensor that was
        taken is not kept, so that few are alive at a time. All random numbers come from the
        generators as they stand when the iteration starts, `torch.default_generator` above all; it
        is afterwards as after the ordinary constructor. Do not draw from it in between. Memory that
        the constructor leaves as it comes (`torch.empty`) is zero.
        """
        return self.tape.play(self.finals)


def record(build: Callable[[], nn.Module]) -> Recording:
    """Run a factory on the meta device and record how it fills the model; nothing is drawn or computed.

    Whatever device the factory asks for, the values are made on the CPU. Tensors with data that it
    brings along are constants; one that shares its memory with NumPy must stay as it is until the
    replay. Tensors in plain attributes, which are neither parameters nor buffers, get their values at once;
    those that were computed of parameters get none (`profiler.computed_attributes`).

    A factory that puts the whole model on the meta device itself gets what `reset` gives.

    Raises OsdpError, naming the op and the line, where the constructor reads random values, hands
    memory to NumPy, or runs an op that the meta device does not support.
    """
    recorder = OpRecorder()
    with recorder.recording():
        module = build()
    parameters = [parameter.detach() for parameter in module.parameters()]
    if parameters and all(tensor.is_meta and not recorder.knows(tensor) for tensor in parameters):
        return _record_reset(module)  # the factory left it empty
    forget_computed(module, torch.device("cpu"))
    _without_data(module, recorder)
    _fill_attributes(module, recorder)
    return Recording(module, recorder.tape, _finals(module, recorder))


def is_meta(module: nn.Module) -> bool:
    """Return whether a module's parameters are on the meta device. Raises OsdpError if only some are."""
    meta = {name: parameter.is_meta for name, parameter in module.named_parameters()}
    if any(meta.values()) and not all(meta.values()):
        without, with_data = (next(name for name, is_meta in meta.items() if is_meta == kind) for kind in (True, False))
        what, got = "only a part of the model is on the meta device", f"{without} has no data, {with_data} has"
        expected = "all parameters on the meta device, or none"
        advice = "build the whole model under torch.device('meta'), or pass a factory"
        raise OsdpError(what, got=got, expected=expected, advice=advice)
    return any(meta.values())


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _finals(module: nn.Module, recorder: OpRecorder) -> dict[str, Ref]:
    return {name: recorder.ref(tensor.detach()) for name, tensor in _named_tensors(module)}


def _without_data(module: nn.Module, recorder: OpRecorder) -> None:
    """Put parameters and buffers with data on the meta device, tied ones as one."""
    done: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for registered in (owner._parameters, owner._buffers):
            for key, tensor in registered.items():
                if tensor is None or tensor.is_meta:
                    continue
                if tensor not in done:
                    meta = recorder.as_meta(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    done[tensor] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                registered[key] = done[tensor]  # type: ignore[assignment]


def _fill_attributes(module: nn.Module, recorder: OpRecorder) -> None:
    """Compute the tensors that modules keep in plain attributes, alone or in containers."""
    done, known = dict[Ref, Tensor](), Replaced()
    buffers = {recorder.ref(one.detach()): one for one in module.buffers()}

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or isinstance(tensor, nn.Parameter):  # `runtime.replaced_parameters` has the latter
            return tensor
        ref = recorder.ref(tensor.detach())
        if ref in buffers:  # `runtime.apply_schedule` puts the one there that gets its values
            return buffers[ref]
        real = done.get(ref, recorder.tape.value(ref))
        if real is None:
            verb = "is" if isinstance(value, Tensor) else "holds"
            what = f"{place} {verb} a random tensor and is neither parameter nor buffer"
            expected = "random tensors as parameters or buffers only"
            raise OsdpError(what, expected=expected, advice=f"register it: self.register_buffer({key!r}, ...)")
        done[ref] = real
        return real

    for name, owner in module.named_modules():
        for key, value in [*plain_attributes(owner)]:
            place = f"{name + '.' if name else ''}{key}"
            vars(owner)[key] = replaced(value, Tensor, filled, known)


def reset(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the full value of each parameter and buffer of a meta-device module, as `Recording.replay` does.

    Every module's own `reset_parameters` (or `_reset_parameters`, or `init_weights`) is called once,
    children before their parents, in the order of registration, as constructors do; a module with
    neither parameters nor buffers of its own is only asked for `_reset_parameters`, since constructors
    call that one alone. The modules' registered tensors stay as they are. Of tied parameters the first
    by registration counts; the others draw their random numbers all the same.

    This equals the ordinary constructor unless that does more than its children's constructors and
    these methods do. It is not exact for `self.apply(initialise)` at the end of a constructor, copied
    layers (`nn.TransformerEncoder`), ties by which a later parameter replaces an earlier one, and
    dtypes other than that of the construction. `record` is exact for all of these.

    Raises OsdpError, naming the module, for one that has tensors which nothing fills.
    """
    return _record_reset(module).replay()


def _record_reset(module: nn.Module) -> Recording:
    recorder = OpRecorder()
    registered = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
    names = [name for name, _ in _named_tensors(module)]
    try:
        _untie(module)
        for _, tensor in _named_tensors(module):
            recorder.adopt(tensor.detach())
        with recorder.recording():
            for owner in _children_first(module, set()):
                if method := _reset_method(owner):
                    method()
        current = _finals(module, recorder)
        finals = {name: current[name] for name in names}
    finally:
        for owner, parameters, buffers in registered:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)
    _check_filled(module, recorder.tape, finals)
    return Recording(module, recorder.tape, finals)


def _untie(module: nn.Module) -> None:
    """Give every owner of a tied parameter but the first one of its own."""
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter in seen:
                owner._parameters[key] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            elif parameter is not None:
                seen.add(parameter)


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    """Return the method by which a module fills its own tensors, if it has one that needs no arguments."""
    owns = any(tensor is not None for tensor in chain(module._parameters.values(), module._buffers.values()))
    for name in ("reset_parameters", "_reset_parameters", "init_weights") if owns else ("_reset_parameters",):
        method = getattr(module, name, None)
        if callable(method):
            with suppress(TypeError):
                signature(method).bind()
                return cast(Callable[[], object], method)
    return None


def _check_filled(module: nn.Module, tape: Tape, finals: Mapping[str, Ref]) -> None:
    filled = tape.constants.keys() | {number for step in tape.steps for number in step.writes}
    for name, ref in finals.items():
        if ref.storage not in filled:
            owner = module.get_submodule(name.rpartition(".")[0])
            got = f"a {type(owner).__name__} without a reset_parameters that fills it"
            advice = f"pass a factory instead of the model, or give {type(owner).__name__} a reset_parameters()"
            raise OsdpError(f"nothing fills {name}, which is on the meta device", got=got, advice=advice)
