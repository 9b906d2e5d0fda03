"""The formats that plans are exported to, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from osdp.export.accelerate import accelerate_config
from osdp.export.deepspeed import deepspeed_config
from osdp.export.fsdp2 import fsdp2_code
from osdp.export.nearest import expressible
from osdp.export.torchtitan import torchtitan_config
from osdp.export.transformers import transformers_config
from planner.analysis.explain import OpenPlan
from profiler.errors import OsdpError
from profiler.mixed_precision import AUTOCAST_DTYPE


@dataclass(frozen=True)
class Exported:
    """A plan in a format."""

    text: str
    remarks: tuple[str, ...] = ()
    """Lines for the user that the text has no place for."""


def _fsdp2(view: OpenPlan, nearest: bool) -> Exported:
    return Exported(fsdp2_code(expressible(view, nearest=nearest)))


def _transformers(view: OpenPlan, nearest: bool) -> Exported:
    return Exported(*transformers_config(view, nearest=nearest))


def _accelerate(view: OpenPlan, nearest: bool) -> Exported:
    return Exported(accelerate_config(view, nearest=nearest))


def _deepspeed(view: OpenPlan, nearest: bool) -> Exported:
    return Exported(*deepspeed_config(view, nearest=nearest))


def _torchtitan(view: OpenPlan, nearest: bool) -> Exported:
    return Exported(torchtitan_config(view, nearest=nearest))


FORMATS: dict[str, Callable[[OpenPlan, bool], Exported]] = {
    "fsdp2": _fsdp2,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}
"""Each takes a plan, and whether it may take the nearest to what the format cannot do."""


def check_format(name: str) -> None:
    """Raise OsdpError if there is no such format."""
    if name not in FORMATS:
        raise OsdpError("there is no such export format", got=name, expected=", ".join(FORMATS))


def exported(view: OpenPlan, name: str, *, nearest: bool) -> Exported:
    """Return a plan in a format. Raises OsdpError for what the format cannot do, unless `nearest`."""
    check_format(name)
    if (precision := view.plan.model.precision) in AUTOCAST_DTYPE:
        what, advice = "a plan whose forwards run under autocast is not exported", "plan with --precision bf16, or fp32"
        raise OsdpError(what, got=precision, expected="bf16 or fp32", advice=advice)
    return FORMATS[name](view, nearest)
