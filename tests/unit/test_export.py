"""`osdp export`: modules as text, what is refused by name, and the nearest plan with its predicted cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from command_line import Cli
from exported import parallelize_of
from parity import FAMILIES, Case, cluster_of, graph_of
from thoroughness import some
from torch import nn

from osdp.export.formats import exported
from osdp.export.fsdp2 import quoted
from osdp.export.nearest import expressible
from osdp.models.user_factory import source_of
from osdp.planning.plan_file import read_plan, write_plan
from osdp.planning.request import Request, plan_model
from planner.analysis.explain import OpenPlan, open_plan
from planner.pins import parse_pin
from profiler.errors import OsdpError

TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "2", "--mem", "1GB", "-o", "plan.yaml")


def view_of(case: Case) -> OpenPlan:
    return open_plan(case.plan(), graph_of(case.family, case.precision), cluster_of(case.nodes, case.ranks_per_node))


def mixed(family: str, precision: str = "bf16") -> Case:
    """Return a case with every statement that a module can have."""
    blocks, operators = graph_of(family).blocks, graph_of(family).operators
    choices = {operators[2].name: "shard_grad+offload", operators[-1].name: "replicate"}
    again = (blocks[0].name,)
    return Case(family, choices, "group_shard:2", again, precision, selective=(blocks[-1].name,))


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_import_torch_alone_and_are_formatted(family: str, tmp_path: Path) -> None:
    """With --thorough of both precisions, else of each by turns."""
    precisions = some(("bf16", "fp32"), 2, FAMILIES.index(family))
    for number, case in enumerate([*(mixed(family, one) for one in precisions), Case(family, {}, "replicate")]):
        text = exported(view_of(case), "fsdp2", nearest=True).text
        (tmp_path / f"{number}.py").write_text(text)
        imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        imported |= {
            one.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for one in node.names
        }
        assert {str(name).split(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"torch"}
    for command in (["format", "--check", "--diff"], ["check", "--select", "F,I,B"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", ["a.b", "it's", 'say "x"', "both ' and \"", "back\\slash", "new\nline", "ü\u202e"])
def test_names_are_literals(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    assert "\n" not in quoted(text)


def test_a_model_without_a_named_module_is_refused_by_the_module() -> None:
    parallelize = parallelize_of(exported(view_of(Case("gpt2", {})), "fsdp2", nearest=False).text)
    with pytest.raises(ValueError, match=r"another model: Linear has no module '\w"):
        parallelize(nn.Linear(2, 2), Mock(ndim=1, size=lambda: 4, device_type="cpu"))
    with pytest.raises(ValueError, match="a mesh of one dimension with 4 ranks"):
        parallelize(nn.Linear(2, 2), Mock(ndim=1, size=lambda: 8))


@pytest.mark.parametrize(
    ("planned", "nearest"),
    [
        ("odc:2", "group_shard:2"),
        ("owner", "shard"),
        ("owner@1", "shard"),
        ("hierarchical", "shard"),
        ("odc_ordered:2", "group_shard:2"),
        ("owner+offload", "shard+offload"),
    ],
)
def test_what_fsdp2_cannot_do_is_refused_by_name_or_replaced(planned: str, nearest: str) -> None:
    operator = graph_of("gpt2").operators[2].name
    view = view_of(Case("gpt2", {operator: planned}))
    with pytest.raises(OsdpError) as refusal:
        exported(view, "fsdp2", nearest=False)
    assert planned in refusal.value.got
    assert operator in refusal.value.got
    assert "--nearest" in refusal.value.advice
    near = expressible(view, nearest=True).view
    assert near.plan.choices == {**view.plan.choices, operator: nearest}
    # Priced as a plan is that says so from the start.
    assert near.prediction == view_of(Case("gpt2", {operator: nearest})).prediction
    text = exported(view, "fsdp2", nearest=True).text
    assert f"{planned} -> {nearest} ({operator})" in text
    assert f"{near.prediction.step_time_s:.4g} s a step" in text


def test_a_split_and_selective_recomputation_of_several_units_are_replaced() -> None:
    blocks, linear = graph_of("gpt2").blocks, next(o for o in graph_of("gpt2").operators if o.kind == "Linear")
    split = view_of(Case("gpt2", {linear.name: "split(2*shard, replicate)"}))
    near = expressible(split, nearest=True)
    assert near.view.plan.choices[linear.name] == "shard"
    inside = next(o.name for o in graph_of("gpt2").operators if o.name.startswith(f"{blocks[0].name}."))
    names = tuple(block.name for block in blocks)
    case = Case("gpt2", {inside: "replicate"}, selective=names)
    near = expressible(view_of(case), nearest=True)
    assert near.view.plan.recomputed_blocks == [names[0]]
    assert near.view.plan.selectively_recomputed_blocks == list(names[1:])
    with pytest.raises(OsdpError, match=names[0]):
        expressible(view_of(case), nearest=False)


@pytest.mark.parametrize("kind", ["RNNCell", "GRUCell", "LSTMCell", "Linear"])
def test_recurrent_layers_are_not_recomputed_selectively(kind: str) -> None:
    graph = graph_of("gpt2")
    name = graph.blocks[0].name
    inside = next(one for one in graph.operators if one.block == 0)
    cells = [replace(one, kind=kind) if one is inside else one for one in graph.operators]
    changed = replace(graph, operators=tuple(cells))
    view = open_plan(Case("gpt2", {}, selective=(name,)).plan(), changed, cluster_of(1, 2))
    near = expressible(view, nearest=True).view.plan
    is_kept = kind == "Linear"
    assert (near.selectively_recomputed_blocks, near.recomputed_blocks) == (([name], []) if is_kept else ([], [name]))


@pytest.mark.parametrize(("shape", "said"), [((), "dimensions"), ((0, 4), "elements")])
def test_parameters_that_no_unit_can_hold_are_refused_by_name(shape: tuple[int, ...], said: str) -> None:
    model, cluster = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), cluster_of(1, 2)
    model.register_parameter("odd", nn.Parameter(torch.empty(shape)))
    source = source_of(model, "a model", None, lambda batch: (torch.empty(batch, 4),))
    planned = plan_model(source, cluster, Request(1 << 30, micro_batch=1, pins=(parse_pin("*=shard"),)))
    with pytest.raises(OsdpError, match=f"cannot hold trained parameters .*{said}") as refused:
        exported(open_plan(planned.plan, planned.graph, cluster), "fsdp2", nearest=True)
    assert refused.value.got == "odd"


class _Reading(nn.Module):
    """Multiplies what an encoder makes of its input with a weight inside of that, which owns another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.inner, self.encoder.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.encoder.forward = lambda x: self.encoder.inner(x) * self.encoder.scale  # type: ignore[method-assign, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.encoder(x) @ self.encoder.inner.weight  # type: ignore[operator, union-attr]
        return product


def test_parameters_that_plain_fsdp2_would_gather_elsewhere_are_refused_by_name() -> None:
    cluster = cluster_of(1, 2)
    source = source_of(_Reading(), "a model", None, lambda batch: (torch.empty(batch, 4),))
    for strategy in ("shard", "replicate"):
        planned = plan_model(source, cluster, Request(1 << 30, micro_batch=1, pins=(parse_pin(f"*={strategy}"),)))
        opened = open_plan(planned.plan, planned.graph, cluster)
        if strategy == "replicate":
            assert "DistributedDataParallel" in exported(opened, "fsdp2", nearest=False).text
            continue
        with pytest.raises(OsdpError, match="gather these with a module inside") as refused:
            exported(opened, "fsdp2", nearest=False)
        assert refused.value.got == "encoder.inner.weight, encoder.inner.bias"


def test_a_nearest_plan_that_does_not_fit_says_so() -> None:
    view = view_of(Case("gpt2", {}, "owner"))
    view = replace(view, plan=replace(view.plan, limit_bytes=1 << 20))
    assert "does NOT fit the plan's limit of 1.0 MiB" in exported(view, "fsdp2", nearest=True).text


def test_the_command_prints_or_writes_and_refuses_with_2(cli: Cli) -> None:
    cli.done(*TINY)
    printed = cli.done("export", "plan.yaml", "--to", "fsdp2")
    assert cli.done("export", "plan.yaml", "--to", "fsdp2", "-o", "parallel.py") == ""
    assert Path("parallel.py").read_text() == printed
    plan = read_plan(Path("plan.yaml"))
    choices = {**plan.choices, next(iter(plan.choices)): "owner"}
    write_plan(Path("owner.yaml"), replace(plan, choices=choices))
    refused = cli("export", "owner.yaml", "--to", "fsdp2", "-o", "other.py")
    assert refused.status == 2
    assert "owner" in refused.err
    assert not Path("other.py").exists()
    assert "owner -> shard" in cli.done("export", "owner.yaml", "--to", "fsdp2", "--nearest")
    unknown = cli("export", "plan.yaml", "--to", "fsdp3")
    assert (unknown.status, "fsdp3" in unknown.err) == (2, True)
