"""What a user gives of the training that is planned: a dict, a YAML file, a plan, or the seed's list."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from osdp.planning.plan_file import read_plan
from planner.optimizers import optimizer_name
from planner.pins import parse_pin
from planner.plan import Plan
from profiler.bounds import Samples, SamplesOfAStep, Tokens
from profiler.errors import OsdpError
from profiler.yaml_files import Problem, read_text, read_yaml, validate


@dataclass(frozen=True)
class Description:
    """The training, as far as a plan depends on it; None is left to the planner or the model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    SCHEMA: ClassVar[str] = "osdp.description/1"

    schema: str = SCHEMA
    precision: Literal["fp32", "bf16", "amp-bf16", "amp-fp16"] = "fp32"
    """`bf16`: mixed precision, parameters compute in bf16; `fp32`: in the dtype that they have; `amp-bf16`, `amp-fp16`:
    the forward runs under `torch.autocast`. Parameters rest in the dtype that they have, gradients are reduced in fp32.
    """
    master_weights: Literal["fp32"] | None = None
    """`fp32`: trained parameters of fewer bits (a bf16 checkpoint's) rest in fp32, and so do their optimizer states."""
    optimizer: Literal["adam", "adamw", "sgd", "fused_adam", "fused_adamw", "fused_sgd"] | None = None
    """None: Adam, unless `optimizer_bytes_per_parameter` is given."""
    optimizer_bytes_per_parameter: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What any other optimizer keeps between steps per trained parameter."""
    micro_batch: Samples | None = None
    """Samples per rank in one forward."""
    global_batch: SamplesOfAStep | None = None
    """Samples per step of all ranks."""
    sequence_length: Tokens | None = None
    """Tokens per sample."""
    expert_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Largest load over the mean of the experts that a router chooses from."""
    name: str | None = None
    """What reports call the model."""
    pins: list[str] = field(default_factory=list)
    """What the user decides, as `osdp plan --pin` takes it: `["*=owner"]` gives everything one strategy."""


Described = None | Plan | Description | Mapping[str, Any] | list[Any] | tuple[Any, ...] | str | Path


def read_description(given: Described) -> Plan | Description:
    """Return what was given as a plan, if it is one, or as a description. Raises OsdpError."""
    match given:
        case Plan() | Description():
            return given
        case None | list() | tuple():
            return Description()  # of the seed's [layers, hidden size, config] the model has all
        case str() | Path():
            path = Path(given)
            if "schema: osdp.plan" in read_text(path):
                return read_plan(path)
            return read_yaml(path, Description, schema=Description.SCHEMA, check=_problems)
        case Mapping():
            return _from_mapping(dict(given))
    expected = "a dict, the path of a YAML file, a Plan, a list [layers, hidden size, config], or None"
    raise OsdpError("the description has an unsupported type", got=type(given).__name__, expected=expected)


def _from_mapping(given: dict[str, Any]) -> Plan | Description:
    kind: type[Plan] | type[Description] = Plan if given.get("schema") == Plan.SCHEMA else Description
    made, problems = validate(given, kind)
    problems = problems or list(_problems(made) if isinstance(made, Description) else ())
    if made is None or problems:
        got = [f"{'.'.join(one.location)} {one.complaint}" + (f" ({one.got})" if one.got else "") for one in problems]
        known = ", ".join(field.name for field in fields(kind))
        raise OsdpError("the description is wrong", got="; ".join(got), expected=known)
    return made


def _problems(description: Description) -> Iterator[Problem]:
    """Find pins that cannot be parsed, and an optimizer that is given twice."""
    try:
        optimizer_name(description.optimizer, description.optimizer_bytes_per_parameter)
    except OsdpError as error:
        yield Problem(("optimizer_bytes_per_parameter",), "contradicts optimizer", error.got, error.expected)
    for index, pin in enumerate(description.pins):
        try:
            parse_pin(pin)
        except OsdpError as error:
            yield Problem(("pins", str(index)), "is not a pin", error.got, error.expected)


def factory_of(model: Any, given: Described) -> Callable[[], Any]:
    """Return the factory that a class or function is, called with the config of the seed's list if that is given."""
    if isinstance(given, list | tuple):
        if len(given) != 3:
            expected = "[layers, hidden size, config]; the model is made by model(config)"
            raise OsdpError("a description that is a list has three entries", got=f"{len(given)}", expected=expected)
        return lambda: model(given[2])
    return model  # type: ignore[no-any-return]
