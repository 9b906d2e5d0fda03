"""What a user says of the training that is planned: a dict, a YAML file, a plan, or the seed's list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from osdp.planning.request import read_plan
from planner.cost.unit_memory import OPTIMIZERS
from planner.pins import parse_pin
from planner.plan import Plan
from planner.strategies.spec import COMPUTE_BYTES
from profiler.errors import OsdpError
from profiler.yaml_files import Problem, read_text, read_yaml, validate


@dataclass(frozen=True)
class Description:
    """The training, as far as a plan depends on it; None is left to the planner or the model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    SCHEMA: ClassVar[str] = "osdp.description/1"

    schema: str = SCHEMA
    """Version of the file format."""
    precision: str = "fp32"
    """Compute dtype, `fp32` or `bf16`; gradients are reduced and parameters rest in fp32."""
    optimizer: str = "adam"
    """`adam`, `adamw` or `sgd`."""
    micro_batch: int | None = None
    """Samples per rank in one forward."""
    global_batch: int | None = None
    """Samples per step of all ranks."""
    sequence_length: int | None = None
    """Tokens per sample."""
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
        case None:
            return Description()
        case list() | tuple():
            return Description()  # the seed's [layers, hidden size, config]: the model says all that
        case str() | Path():
            path = Path(given)
            if "schema: osdp.plan" in read_text(path):
                return read_plan(path)
            return read_yaml(path, Description, schema=Description.SCHEMA, check=_problems)
        case Mapping():
            return _from_mapping(dict(given))
    raise OsdpError(
        "the description is of no known form",
        got=type(given).__name__,
        expected="a dict, a path of a YAML file, a Plan, the seed's list, or None",
    )


def _from_mapping(given: dict[str, Any]) -> Plan | Description:
    """Return a plan or a description from its fields."""
    kind: type[Plan] | type[Description] = Plan if given.get("schema") == Plan.SCHEMA else Description
    made, problems = validate(given, kind)
    problems = problems or list(_problems(made) if isinstance(made, Description) else ())
    if made is None or problems:
        known = ", ".join(field.name for field in fields(kind))
        raise OsdpError("the description is wrong", got="; ".join(map(_told, problems)), expected=known)
    return made


def _told(problem: Problem) -> str:
    """Return a problem in words."""
    return f"{'.'.join(map(str, problem.location))} {problem.complaint}" + (f" ({problem.got})" if problem.got else "")


def _problems(description: Description) -> Iterator[Problem]:
    """Find values that have the right type and yet cannot be."""
    if description.precision not in COMPUTE_BYTES:
        yield Problem(("precision",), "is not known", description.precision, ", ".join(COMPUTE_BYTES))
    if description.optimizer not in OPTIMIZERS:
        yield Problem(("optimizer",), "is not known", description.optimizer, ", ".join(OPTIMIZERS))
    for name in ("micro_batch", "global_batch", "sequence_length"):
        value = getattr(description, name)
        if value is not None and value < 1:
            yield Problem((name,), "is wrong", str(value), "at least 1")
    for index, pin in enumerate(description.pins):
        try:
            parse_pin(pin)
        except OsdpError as error:
            yield Problem(("pins", str(index)), "is not a pin", error.got, error.expected)


def factory_of(model: Any, given: Described) -> Callable[[], Any]:
    """Return the factory that a class or function is, called with the config of the seed's list if that is given."""
    if isinstance(given, list | tuple):
        if len(given) != 3:
            raise OsdpError(
                "the seed's description has three entries",
                got=f"{len(given)}",
                expected="[layers, hidden size, config]; the model is made by model(config)",
            )
        return lambda: model(given[2])
    return model  # type: ignore[no-any-return]
