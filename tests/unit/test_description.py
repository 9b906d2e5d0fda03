"""What a user can say of the training, in every form, and what is said back where it is wrong."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from parity import Case

from osdp.description import Description, factory_of, read_description
from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.yaml_files import write_yaml


def test_every_form_of_the_same(tmp_path: Path) -> None:
    wanted = Description(
        precision="bf16",
        optimizer="sgd",
        micro_batch=3,
        global_batch=24,
        sequence_length=5,
        name="x",
        pins=["*=owner", "blocks.*=recompute"],
    )
    fields = {key: value for key, value in asdict(wanted).items() if key != "schema"}
    path = tmp_path / "description.yaml"
    write_yaml(path, wanted, "")
    assert read_description(fields) == wanted
    assert read_description(asdict(wanted)) == wanted
    assert read_description(path) == wanted
    assert read_description(str(path)) == wanted
    assert read_description(wanted) is wanted
    assert "micro_batch: 3" in path.read_text()


def test_what_is_not_said_is_left_open() -> None:
    nothing = Description()
    assert read_description(None) == nothing == read_description({})
    assert read_description([12, 64, object()]) == nothing
    assert (nothing.precision, nothing.optimizer, nothing.micro_batch) == ("fp32", None, None)


def test_plans_are_told_from_descriptions(tmp_path: Path) -> None:
    plan = Case("gpt2", {}, "group_shard:2").plan()
    write_yaml(tmp_path / "plan.yaml", plan, "how")
    assert read_description(plan) is plan
    assert read_description(tmp_path / "plan.yaml") == plan
    made = read_description(asdict(plan))
    assert isinstance(made, Plan)
    assert made == plan


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batches": 3}, ["micro_batches", "micro_batch"]),
        ({"precision": "fp8"}, ["precision", "fp8"]),
        ({"optimizer": "lion", "micro_batch": 0}, ["optimizer", "lion", "micro_batch", "0"]),
        ({"micro_batch": "many"}, ["micro_batch"]),
        ({"pins": ["owner"]}, ["pins.0", "'owner'"]),
        ({"pins": "*=owner"}, ["pins"]),
        ({"schema": "osdp.plan/1"}, ["choices"]),
        (3, ["int", "YAML"]),
        ("/nowhere/description.yaml", ["/nowhere/description.yaml"]),
    ],
)
def test_mistakes_are_named(given: Any, words: list[str]) -> None:
    with pytest.raises(OsdpError) as raised:
        read_description(given)
    assert all(word in str(raised.value) for word in words), raised.value


def test_mistakes_in_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "description.yaml"
    for text, words in {
        "schema: osdp.description/1\nmicro_batch: 0\n": ["micro_batch", "1 or more", "line 2"],
        "schema: osdp.description/1\nprecison: bf16\n": ["precison"],
        "schema: osdp.description/2\n": ["osdp.description/1"],
        "- 3\n": ["description.yaml"],
    }.items():
        path.write_text(text)
        with pytest.raises(OsdpError) as raised:
            read_description(path)
        assert all(word in str(raised.value) for word in words), raised.value


def test_the_seeds_list_calls_the_class_with_its_config() -> None:
    def build(*args: Any) -> tuple[Any, ...]:
        return args

    assert factory_of(build, [12, 64, "config"])() == ("config",)
    assert factory_of(build, None) is build
    with pytest.raises(OsdpError, match="three entries"):
        factory_of(build, [12, 64])
