"""Plan files: written, read, and opened again with the model and the cluster that they are for.

Plan --write_plan--> YAML --read_plan--> Plan --reopen--> OpenPlan (what `planner.analysis.explain` takes apart)
"""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from osdp.planning.named_model import NamedModel, TraceSettings
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import OpenPlan, open_plan
from planner.plan import Plan, cluster_fingerprint
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.yaml_files import Problem, read_text, read_yaml, write_yaml

Loaded = TypeVar("Loaded")


def check_output(path: Path, kind: str = "plan") -> None:
    """Raise OsdpError if a plan (or a `cluster`) should not or cannot be written to `path`.

    One that is there may be replaced, and so may an empty file; nothing else of the user's.
    """
    if path.is_dir():
        raise OsdpError(f"{path} cannot be written", got="it is a directory", expected=f"a file, such as {kind}.yaml")
    if not path.parent.is_dir():
        advice = f"make the directory first: mkdir -p {path.parent}"
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=advice)
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        is_ours = re.search(rf"^schema: osdp\.{kind}/", read_text(path), re.MULTILINE) is not None
    except OsdpError:
        is_ours = False  # Not text, or nothing that we may read.
    if not is_ours:
        what = f"{path} exists and is not a {kind}, so it is not overwritten"
        raise OsdpError(what, advice="another -o, or move that file away")


def write_plan(path: Path, plan: Plan, how: str = "") -> None:
    """Write a plan as YAML, whole or not at all; `how` is a comment on how it was made. Raises OsdpError."""
    check_output(path)
    write_yaml(path, plan, how)


def read_plan(path: Path) -> Plan:
    """Return the plan in the file at `path`; raises OsdpError with the line of what is wrong."""
    return read_yaml(path, Plan, schema=Plan.SCHEMA, check=_problems)


def _problems(plan: Plan) -> Iterator[Problem]:
    """Find what the ranges of single fields do not show."""
    if plan.headroom_bytes >= plan.limit_bytes:
        yield Problem(("headroom_bytes",), "is wrong", str(plan.headroom_bytes), "less than the limit")


def reopen(plan: Plan, model: str | None = None, cluster: str | None = None) -> OpenPlan:
    """Trace the plan's model again and return the plan with all that its figures are made of.

    `model` and `cluster` replace the names that the plan knows them by.  Warns if the cluster's
    figures are not those that the plan was made with.  Raises OsdpError if they cannot be loaded, or
    if the model is not the one that the plan was made for.
    """
    length, ranks = plan.model.sequence_length, (plan.cluster.nodes, plan.cluster.gpus_per_node)
    source = NamedModel(model, length) if model is not None else _ModelOfPlan(plan.model.name, length)
    target = _load("cluster", cluster, plan.cluster.name, lambda spec: load_cluster(spec, *ranks))
    if cluster_fingerprint(target) != plan.cluster.fingerprint:
        text = f"the figures of the cluster {target.name} have changed since the plan was made, so predictions differ"
        warnings.warn(text, stacklevel=2)
    ref = plan.model
    asked = plan.micro_batch, ref.master_weights, plan.asked.expert_imbalance, target.world_size
    traced = source.traced(TraceSettings(ref.precision, target.device.kind, *asked))
    return open_plan(plan, traced.graph, target)


class _ModelOfPlan(NamedModel):
    """A model by the name in the plan."""

    def load(self) -> ModelSource:
        return _load("model", None, self.name, lambda spec: load_model(spec, sequence_length=self.sequence_length))


def _load(what: str, given: str | None, known: str, load: Callable[[str], Loaded]) -> Loaded:
    """Load what was given, or by the name in the plan; its errors then advise how to give another."""
    if given is not None:
        return load(given)
    try:
        return load(known)
    except OsdpError as error:
        advice = f"--{what} with its present name or path" + (f"; {error.advice}" if error.advice else "")
        complaint = f"the plan's {what} cannot be loaded by its name: {error.what}"
        raise OsdpError(complaint, got=error.got or repr(known), expected=error.expected, advice=advice) from error
