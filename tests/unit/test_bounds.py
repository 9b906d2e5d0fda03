"""What is too large to be meant is refused at once: whole numbers in options and files, and files."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from command_line import Cli

from osdp.cli.app import app
from osdp.cli.commands.train import train
from osdp.description import Description
from osdp.models.config import FAMILIES
from osdp.planning.plan_file import read_plan
from osdp.training.config import TrainConfig, load_config
from osdp.zoo import ModelCard
from planner.plan import Plan
from profiler import yaml_files
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.yaml_files import LARGEST_YAML_BYTES, MOST_VALUES, parse

HUGE = (10**18, 2**63 - 1, 10**400)


def whole_numbers(hint: Any, bounds: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return what annotates each `int` inside a type."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        yield from whole_numbers(inner, (*bounds, *more))
    elif hint is int:
        yield bounds
    elif isinstance(hint, types.UnionType) or get_origin(hint) in (typing.Union, list, tuple, dict):
        for part in get_args(hint):
            yield from whole_numbers(part, bounds)


def unbounded(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Return the fields of a dataclass, and of those inside, that take whole numbers of any size."""
    if not is_dataclass(kind) or kind in seen:
        return
    seen.add(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        for bounds in whole_numbers(hints[field.name]):
            each = [*bounds, *(more for bound in bounds for more in getattr(bound, "metadata", ()))]
            if not any(getattr(bound, "le", None) is not None for bound in each):
                yield f"{getattr(kind, '__name__', kind)}.{field.name}"
        for part in _parts(hints[field.name]):
            yield from unbounded(part, seen)


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def test_every_whole_number_in_a_file_has_a_bound() -> None:
    kinds = (TrainConfig, Plan, Description, Cluster, ModelCard, *(family.config for family in FAMILIES.values()))
    assert [name for kind in kinds for name in unbounded(kind, set())] == []


def test_every_whole_number_of_an_option_has_a_bound() -> None:
    """Those of `osdp train` are fields of its configuration."""
    without = []
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for bounds in whole_numbers(hint):
                is_field = command.callback is train and name in TrainConfig.__dataclass_fields__
                if not is_field and not any(getattr(bound, "max", None) is not None for bound in bounds):
                    without.append(f"{command.callback.__name__} {name}")
    assert without == []


@pytest.mark.parametrize("number", HUGE, ids=["10**18", "2**63 - 1", "10**400"])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--model", "gpt2-tiny", "--global-batch"),
        ("plan", "--model", "gpt2-tiny", "--gpus-per-node"),
        ("partition", "--model", "gpt2-tiny", "--ranks"),
        ("profile", "--device", "cpu", "--batch"),
        ("train", "--ranks-per-node"),
        ("train", "--seed"),
    ],
    ids=" ".join,
)
def test_huge_numbers_are_refused_at_once(cli: Cli, command: tuple[str, ...], number: int) -> None:
    if command[-1] == "--seed" and number < 2**63:
        pytest.skip("a seed")
    outcome = cli(*command, str(number))
    assert (outcome.status, outcome.out) == (2, "")
    assert command[-1].removeprefix("--") in outcome.err
    assert "bug" not in outcome.err


def test_a_huge_number_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("schema: osdp.train/1\nmodel: gpt2-tiny\nsteps: 1\nranks_per_node: 2000000000\n")
    with pytest.raises(
        OsdpError, match="line 4: `ranks_per_node` is wrong\n  got: 2000000000\n  expected: at most 1,024"
    ):
        load_config(str(path), {})


def test_a_file_that_is_larger_than_any_plan_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"schema: osdp.plan/1\n#" + b"x" * LARGEST_YAML_BYTES)
    with pytest.raises(OsdpError) as told:
        read_plan(path)
    assert told.value.what == f"{path} is too large"
    assert all((told.value.got, told.value.expected, told.value.advice))


@pytest.mark.parametrize("text", ["  a{}: b\n" * 3, "- {}\n" * 3, "[{}, {}, {}]", "- []\n" * 3, "- [[{}]]\n" * 2])
def test_more_values_than_any_plan_has_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_VALUES > 2 * 100_000
    monkeypatch.setattr(yaml_files, "MOST_VALUES", 3)
    with pytest.raises(yaml_files.TooMuchError, match="too many values"):
        parse(text.format(*range(4)))


@pytest.mark.parametrize("text", ["a: {}", "{}: 1", "? {}\n: 1", "- '{}'"])
def test_text_that_is_too_long_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_files, "LONGEST_TEXT", 100)
    with pytest.raises(yaml_files.TooMuchError, match="too long"):
        parse(text.format("x" * 101))


def test_of_many_problems_few_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with all known names."""
    path, looked_at = tmp_path / "run.yaml", []
    path.write_text("schema: osdp.train/1\n" + "".join(f"a{number}: 1\n" for number in range(1000)))
    monkeypatch.setattr(yaml_files, "get_close_matches", lambda *names, n: looked_at.append(names) or [])
    with pytest.raises(OsdpError) as told:
        load_config(str(path), {})
    assert told.value.what.endswith("line 7: `a5` is not known here and many more")
    assert len(looked_at) <= 100
