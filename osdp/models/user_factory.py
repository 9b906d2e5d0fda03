"""The user's own model: `package.module:factory`, `file.py:factory`, a factory or a module, as the tracer needs it.

The factory takes no arguments and returns a module, or a module and a function `example_inputs`.
What to feed the module is, in this order: what that function returns for a micro-batch, what the
module's own method `example_inputs` returns, or what its first layer with parameters suggests.
The tracer builds the model again, without data: a factory is called, a module is copied with empty
parameters and buffers in place of its own.
"""

import inspect
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import profiler
from profiler.computed_attributes import stand_ins
from profiler.errors import OsdpError
from profiler.model_source import Inputs, ModelSource
from profiler.module_copies import copied
from profiler.opaque_parameters import is_opaque, rebuilt
from profiler.trace.dataless_device import FakeCpu, MetaDevice, making
from profiler.trace.trace_errors import ModelError, more_telling

Model = nn.Module | Callable[[], Any]
"""A module, or a factory of one."""
ExampleInputs = Callable[..., Any] | None
"""Function of a batch size that returns the arguments of forward, if the user gives one."""
DEFAULT_LENGTH = 128
"""Tokens per sample where neither the user nor the model gives a length."""
IMAGE_SIZE = 224
"""Height and width of an image for a convolution."""
_HOW = (
    "return (module, example_inputs) from the factory, or give the module a method example_inputs; "
    "called with a batch size, it returns the arguments of forward"
)
_NO_DATA = (
    "if it needs the values of tensors (x.item(), loaded weights): OSDP builds models without data; "
    'use Python numbers, or `with torch.device("cpu")`'
)


@dataclass
class _UserModel:
    """A factory and what is known of how to feed what it makes."""

    spec: str
    factory: Callable[[], Any]
    sequence_length: int | None
    inputs_of: Callable[..., Any] | None = field(default=None, init=False)
    """Function that the factory returned beside the last module that it made."""

    def build(self) -> nn.Module:
        """Call the factory; raises ModelError for whatever goes wrong in it, as it may not on another device."""
        what = f"the factory {self.spec} raised an exception"
        with _guard(what, _NO_DATA, ModelError), _current_directory_on_path():
            made = self.factory()
        module, self.inputs_of = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module) or not (self.inputs_of is None or callable(self.inputs_of)):
            expected = "an nn.Module, or an nn.Module and a function example_inputs"
            raise OsdpError(f"{self.spec} does not make a model", got=_kind(made), expected=expected)
        return module

    def example_inputs(self, module: nn.Module, micro_batch: int) -> Inputs:
        """Return arguments for the module's forward."""
        inputs_of = self.inputs_of or getattr(module, "example_inputs", None)
        if inputs_of is None:
            return _inferred(self.spec, module, micro_batch, self.sequence_length)
        takes_length = "sequence_length" in inspect.signature(inputs_of).parameters
        keywords = {"sequence_length": self.sequence_length} if takes_length else {}
        try:
            inspect.signature(inputs_of).bind(micro_batch, **keywords)
        except TypeError as error:
            got = f"example_inputs{inspect.signature(inputs_of)}: {error}"
            expected = "example_inputs(batch) or example_inputs(batch, sequence_length)"
            raise OsdpError(f"example_inputs of {self.spec} cannot be called", got=got, expected=expected) from None
        with _guard(f"example_inputs of {self.spec} raised an exception"):
            made = inputs_of(micro_batch, **keywords)
        return _arguments(self.spec, made)

    def source(self) -> ModelSource:
        """Build and feed the model once without data, to find mistakes now and to learn the sequence length."""
        try:
            with making(MetaDevice()):
                args, kwargs = self.example_inputs(self.build(), 1)
        except OsdpError as error:  # It may want a real device.
            try:
                with making(FakeCpu()):
                    args, kwargs = self.example_inputs(self.build(), 1)
            except OsdpError as second:
                clearer = more_telling(error, second)
                raise clearer from clearer.__cause__
        return ModelSource(self.spec, self.build, self.example_inputs, _length_of((*args, *kwargs.values())))


def load_user_model(spec: str, sequence_length: int | None) -> ModelSource:
    """Return the model that the factory named by `spec` makes; raises OsdpError."""
    model = _UserModel(spec, _find_factory(spec), sequence_length)
    source = model.source()
    if sequence_length is not None and source.sequence_length != sequence_length:
        warnings.warn(f"the sequence length {sequence_length} has no effect on {spec}", stacklevel=2)
    elif sequence_length is None and model.inputs_of is None and source.sequence_length == DEFAULT_LENGTH:
        warnings.warn(f"{spec}: {DEFAULT_LENGTH} tokens per sample, unless you say otherwise", stacklevel=2)
    return source


def source_of(model: Model, name: str, sequence_length: int | None, example_inputs: ExampleInputs) -> ModelSource:
    """Return a module or a factory, to be called `name`, for the tracer.

    `example_inputs(batch)` gives the arguments of forward; without it they are found as for a named
    factory.  Raises OsdpError.
    """
    build = (lambda: _without_data(model)) if isinstance(model, nn.Module) else model
    factory = build if example_inputs is None else lambda: (build(), example_inputs)
    return _UserModel(name, factory, sequence_length).source()


def _without_data(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters are empty ones on the current default device; there, buffers are copied.

    What was computed of parameters is not in it: a tensor with a history could not be copied.
    """
    from torch.distributed.fsdp import FSDPModule  # here, as it takes long to import

    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise OsdpError("the model is sharded already", advice="build it again for another plan")
    if lazy := [
        name for name, one in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(one)
    ]:
        what = "the model is lazy: some shapes are not known before its first forward"
        raise OsdpError(what, got=", ".join(lazy[:3]), advice="run a forward before OSDP(...), or give the input sizes")
    empty_of: dict[int, Any] = {**stand_ins(module, torch.empty(0).device)}
    for name, parameter in module.named_parameters():
        empty_of[id(parameter)] = (
            rebuilt(name, parameter, _empty)
            if is_opaque(parameter)
            else nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
        )
    for buffer in module.buffers():
        empty_of[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype).copy_(buffer)
    try:
        return copied(module, empty_of)
    except (TypeError, RuntimeError, AttributeError) as error:
        what = "the model cannot be copied, which planning needs"
        advice = "pass a function that builds it: OSDP(lambda: Model(...), ...)"
        raise OsdpError(what, got=f"{type(error).__name__}: {error}", advice=advice) from error


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _find_factory(spec: str) -> Callable[[], Any]:
    """Import what `spec` names and check that it can be called without arguments."""
    place, _, attribute = spec.partition(":")
    is_file = place.endswith(".py")
    if not place or not attribute or ("/" in place and not is_file):
        expected = "package.module:function or path/to/file.py:function"
        raise OsdpError(f"{spec} does not name a factory", expected=expected)
    module_name = _name_of_file(spec, place) if is_file else place
    module = _import(module_name, place if is_file else "")
    try:
        factory: Callable[[], Any] = attrgetter(attribute)(module)
    except AttributeError:
        where = getattr(module, "__file__", None) or module_name
        names = sorted(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        expected = f"one of {', '.join(names[:12])}" if names else "a function that returns the model"
        raise OsdpError(f"{where} has no `{attribute}`", got=spec, expected=expected) from None
    if isinstance(factory, nn.Module) or not callable(factory):
        expected = "a function or class that makes the model"
        advice = f"wrap it: def make_model(): return {attribute}"
        raise OsdpError(f"{spec} is not a factory", got=_kind(factory), expected=expected, advice=advice)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        got = f"{attribute}{inspect.signature(factory)}: {error}"
        advice = "write a function without parameters that calls it"
        raise OsdpError(f"{spec} needs arguments", got=got, expected="none", advice=advice) from None
    except ValueError:
        pass  # a class written in C, which has no signature
    return factory


def _name_of_file(spec: str, path: str) -> str:
    """Return the name by which a file below the current directory is imported; raises OsdpError."""
    file, here = Path(os.path.abspath(path)), Path.cwd()
    if not file.is_file():
        raise OsdpError(f"there is no file {path}", got=spec, expected="path/to/file.py:function")
    if not file.is_relative_to(here):
        what, expected = f"{path} is not below the current directory", "a file below it, or package.module:function"
        raise OsdpError(what, got=spec, expected=expected, advice=f"run from {file.parent}, with {file.name}:...")
    names = [one for one in file.relative_to(here).with_suffix("").parts if one != "__init__"]
    if any("." in one for one in names):
        what, expected = f"{path} cannot be imported", "names of folders and of the file without dots, but for .py"
        raise OsdpError(what, got=spec, expected=expected, advice="rename it, or import it in a file elsewhere")
    return ".".join(names)


def _import(name: str, file: str = "") -> Any:
    """Import the module `name` from sys.path or, last, from the current directory; given a `file`, from that."""
    try:
        with _guard(f"importing {name} raised an exception"), _current_directory_on_path():
            module = import_module(name)
            if file and not (module.__file__ and os.path.samefile(module.__file__, file)):
                what, got = f"another module has the name {name}", module.__file__ or "one of Python's own"
                raise OsdpError(what, got=got, expected=file, advice="rename the file")
            return module
    except OsdpError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            if file:
                package = name.partition(".")[0]
                got = getattr(sys.modules.get(package), "__file__", None) or f"a package {package}"
                what = f"another package has the name {package}"
                raise OsdpError(what, got=got, expected=file, advice="rename the folder") from None
            advice = f"run from the directory that holds {name.split('.')[0]}, or install the package"
            raise OsdpError(f"there is no module {cause.name}", got=name, advice=advice) from None
        raise


@contextmanager
def _current_directory_on_path() -> Iterator[None]:
    """Let imports find the current directory too, after everything else."""
    here = str(Path.cwd())
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(here)


@contextmanager
def _guard(what: str, advice: str = "", kind: type[OsdpError] = OsdpError) -> Iterator[None]:
    """Turn any exception of the user's code into an OsdpError of a kind that says where it was raised."""
    try:
        yield
    except OsdpError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(what, got=f"{type(error).__name__}: {error} ({_place(error)})", advice=advice) from error


def _place(error: BaseException) -> str:
    """Return file:line of the user's code that raised, or of the library's if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    ours = (__file__, str(Path(profiler.__file__).parent))
    not_users = (*ours, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(not_users)]
    last = (users or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def _inferred(spec: str, module: nn.Module, batch: int, sequence_length: int | None) -> Inputs:
    """Guess the arguments of `forward` from the first layer that owns parameters."""
    owners = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    first = next(owners, None)
    parameters = list(inspect.signature(module.forward).parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind in by_name]
    if needed or not isinstance(first, nn.Embedding | nn.Linear | nn.Conv2d):
        got = f"forward needs {', '.join(needed)} too" if needed else f"its first layer is {_kind(first)}"
        expected = "one argument, and an Embedding, Linear or Conv2d first"
        raise OsdpError(f"the inputs of {spec} cannot be guessed", got=got, expected=expected, advice=_HOW)
    device, dtype = first.weight.device, first.weight.dtype
    if isinstance(first, nn.Linear):
        return (torch.randn(batch, first.in_features, device=device, dtype=dtype),), {}
    if isinstance(first, nn.Conv2d):
        size = (batch, first.in_channels, IMAGE_SIZE, IMAGE_SIZE)
        return (torch.randn(size, device=device, dtype=dtype),), {}
    length = sequence_length or DEFAULT_LENGTH
    tokens = torch.randint(first.num_embeddings, (batch, length), device=device)
    labels = [p.name for p in parameters if p.name in ("labels", "targets")]
    return (tokens,), {name: tokens.clone() for name in labels}


def _arguments(spec: str, made: Any) -> Inputs:
    """Return what example_inputs gave as positional and keyword arguments."""
    match made:
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), kwargs
        case Tensor():
            return (made,), {}
        case dict():
            return (), made
        case tuple() | list() if made:
            return tuple(made), {}
    expected = "a tensor, a tuple of arguments, a dict of keyword arguments, or (tuple, dict)"
    raise OsdpError(f"example_inputs of {spec} returned no arguments", got=_kind(made), expected=expected)


def _length_of(values: tuple[Any, ...]) -> int:
    """Return the tokens per sample: the second dimension of the first whole-number matrix, else 1."""
    matrices = (value for value in values if isinstance(value, Tensor) and value.dim() == 2)
    return next((matrix.shape[1] for matrix in matrices if not matrix.is_floating_point()), 1)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(_kind(part) for part in value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
