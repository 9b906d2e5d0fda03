"""Training configurations: what is read, what is refused, and options that win over the file."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from parity import Case

from osdp.cli.commands.train import train
from osdp.planning.plan_file import write_plan
from osdp.resources import resource_names
from osdp.training.config import TrainConfig, load_config
from osdp.training.job import prepare, ranks_to_start
from osdp.training.lr_schedule import learning_rate
from profiler.errors import OsdpError

SMALLEST = "schema: osdp.train/1\nmodel: gpt2-tiny\nsteps: 10\n"


def written(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST + more)
    return str(path)


def test_every_configuration_that_comes_with_osdp_is_read() -> None:
    assert resource_names("train") == ["bert", "bert-large", "gpt2", "gpt2-1.5b"]
    large = load_config("gpt2-1.5b", {})
    assert (large.model, large.mem, large.seq) == ("gpt2-1.5b", "8GB", 1024)
    assert load_config(None, {}) == load_config("gpt2", {})
    small, bert = load_config("bert", {}), load_config("bert-large", {})
    assert (small.emulated_nodes, small.ranks_per_node, ranks_to_start(small)) == (2, 2, 4)
    assert (bert.model, bert.task, bert.sharding) == ("bert-large", "sentences", "FSDP with group_sharding")


def test_options_are_the_fields() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"schema"}
    own = {"context", "config", "nnodes", "nodes", "node_rank", "rdzv_endpoint", "restarts", "quiet"}
    assert set(inspect.signature(train).parameters) - own == fields


def test_every_field_and_its_default_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table = text.partition("| field | default | |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| .+ \|$", table, re.M))
    words = {dataclasses.MISSING: "required", None: "-", False: "false"}
    fields = [field for field in dataclasses.fields(TrainConfig) if field.name != "schema"]
    assert [*rows] == [field.name for field in fields]
    for field in fields:
        default = field.default
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        assert rows[field.name] == (f"{default:g}" if is_number else words.get(default, default)), field.name


def test_an_option_wins_over_the_file_and_none_does_not(tmp_path: Path) -> None:
    spec = written(tmp_path, "lr: 0.5\nclip: 2\n")
    config = load_config(spec, {"lr": 0.25, "clip": None, "steps": 3})
    assert (config.lr, config.clip, config.steps) == (0.25, 2, 3)


def test_data_means_bytes_and_the_type_may_be_lower_case(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "task: addition\n"), {"data": "corpus.txt", "fsdp_type": "fsdp"})
    assert (config.task, config.fsdp_type) == ("bytes", "FSDP")


def test_data_of_sentences_stays_a_text_of_sentences() -> None:
    config = load_config("bert", {"data": "corpus.txt"})
    assert (config.task, config.data) == ("sentences", "corpus.txt")


@pytest.mark.parametrize(
    ("options", "fsdp_type", "fsdp_args", "sharding"),
    [
        ({}, "FSDP", "group_sharding", "FSDP with group_sharding"),
        ({"fsdp_args": "none"}, "FSDP", "none", "FSDP"),
        (
            {"fsdp_args": "communication_with_groups"},
            "FSDP",
            "communication_with_groups",
            "FSDP with communication_with_groups",
        ),
        ({"fsdp_type": "osdp"}, "OSDP", None, "OSDP"),
        ({"fsdp_type": "FSDP"}, "FSDP", None, "FSDP"),
        ({"fsdp_type": "FSDP", "fsdp_args": "group_sharding"}, "FSDP", "group_sharding", "FSDP with group_sharding"),
    ],
)
def test_type_and_groups_replace_each_other(
    options: dict[str, Any], fsdp_type: str, fsdp_args: str | None, sharding: str
) -> None:
    config = load_config("bert", options)
    assert (config.fsdp_type, config.fsdp_args, config.sharding) == (fsdp_type, fsdp_args, sharding)
    assert load_config("gpt2", {"fsdp_args": "none"}).fsdp_type == "FSDP"


@pytest.mark.parametrize(
    ("more", "line", "told"),
    [
        ("lr: fast\n", 4, "`lr` is wrong"),
        ("learning_rate: 1\n", 4, "`learning_rate` is not known"),
        ("steps: 0\n", 4, "given twice"),
        ("clip: 0\n", 4, "`clip` is wrong"),
        ("seed: 1\noptimizer: lion\n", 5, "`optimizer` is not known"),
        ("mem: 8 bananas\n", 4, "`mem` is wrong"),
        ("task: bytes\n", 4, "`data` is missing"),
        ("data: x.txt\n", 4, "`data` has no effect on the task addition"),
        ("plan: p.yaml\nfsdp_type: DDP\n", 4, "`plan` cannot be run as DDP"),
        ("digits: 10\n", 4, "`digits` is wrong"),
        ("fsdp_args: none\n", 4, "`fsdp_args` has no effect on OSDP"),
        ("fsdp_type: FSDP\nfsdp_args: groups\n", 5, "`fsdp_args` is not known"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, more: str, line: int, told: str) -> None:
    with pytest.raises(OsdpError) as refusal:
        load_config(written(tmp_path, more), {})
    assert told in str(refusal.value)
    if told != "`data` is missing":
        assert f"line {line}" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 0}, "--steps is wrong"),
        ({"global_batch": -1}, "--global-batch is wrong"),
        ({"fsdp_type": "zero"}, "--fsdp-type is not known"),
        ({"lr": float("inf")}, "--lr is wrong"),
        ({"task": "addition", "data": "x"}, "--data has no effect"),
        ({"fsdp_args": "groups"}, "--fsdp-args is not known"),
        ({"master_weights": "fp64"}, "--master-weights is not known"),
        ({"fsdp_args": "none", "fsdp_type": "DDP"}, "--fsdp-args has no effect on DDP"),
        ({"emulated_nodes": 0}, "--emulated-nodes is wrong"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(OsdpError, match=told):
        load_config(written(tmp_path), options)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(OsdpError, match="did you mean gpt2"):
        load_config("gpt", {})


def refused(spec: str, **options: Any) -> str:
    """Return the message with which a configuration that can be read is refused before ranks start."""
    with pytest.raises(OsdpError) as refusal:
        prepare(load_config(spec, options))
    return str(refusal.value)


def test_what_does_not_fit_together_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    spec = written(tmp_path)
    assert "cannot learn the task addition" in refused(spec, model="bert-large")
    assert "cannot learn the task sentences" in refused(spec, task="sentences")
    assert "too short for a pair of sentences" in refused("bert", seq=15)
    assert "does not exist" in refused("bert", data=str(tmp_path / "none.txt"))
    assert "does not exist" in refused(spec, data=str(tmp_path / "none.txt"))
    assert "a sum does not go into a sample" in refused(spec, seq=6)
    assert "gpt2-tiny cannot take sequences this long" in refused(spec, seq=1000)
    assert "there is no checkpoint" in refused(spec, resume=str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(spec, checkpoint=str(tmp_path / "file" / "folder"))


def test_a_plan_of_other_weights_or_another_optimizer_is_refused(tmp_path: Path) -> None:
    plan, spec = Case("gpt2", {}, "shard").plan(), written(tmp_path, "optimizer: adam\nbatch: 2\n")
    for name, other, options in (
        ("plain", plan, {"master_weights": "fp32"}),
        ("kept", dataclasses.replace(plan, optimizer="states of 2 bytes per parameter"), {}),
    ):
        write_plan(tmp_path / f"{name}.yaml", other)
        told = refused(spec, plan=str(tmp_path / f"{name}.yaml"), **options)
        assert {"plain": "another master weights", "kept": "another optimizer"}[name] in told
        assert "plan again as the configuration says" in told


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    card = tmp_path / "digits.yaml"
    card.write_text(
        "schema: osdp.model/1\nname: digits\nfamily: gpt2\ndescription: x\nsource: 'assumed: test'\n"
        "sequence_length: 8\nconfig:\n  vocabulary_size: 9\n  maximum_positions: 8\n  hidden_size: 8\n"
        "  layers: 1\n  heads: 1\n"
    )
    told = refused(written(tmp_path), model=str(card))
    assert "knows too few tokens" in told
    assert "at least 10" in told


def test_a_sample_is_one_sum_unless_said_otherwise(tmp_path: Path) -> None:
    job = prepare(load_config(written(tmp_path), {"digits": 3}))
    assert (job.task.sequence_length, job.source.sequence_length) == (10, 10)
    text = tmp_path / "text"
    text.write_text("x" * 100)
    assert prepare(load_config(written(tmp_path), {"data": str(text)})).task.sequence_length == 64


def test_learning_rate_by_hand(tmp_path: Path) -> None:
    """Warm-up over 4 of 14 steps to 0.8, then half a cosine of 10 steps from 0.8 towards 0.08."""
    options = {"steps": 14, "lr": 0.8, "warmup_steps": 4, "schedule": "cosine"}
    config = load_config(written(tmp_path), options)
    rates = [learning_rate(config, done) for done in range(14)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[9] == pytest.approx((0.8 + 0.08) / 2)  # half way
    assert rates[13] == pytest.approx(0.08 + 0.72 * 0.0244717, rel=1e-5)  # (1 + cos(0.9 pi)) / 2
    constant = dataclasses.replace(config, schedule="constant")
    assert [learning_rate(constant, done) for done in (3, 4, 13)] == [0.8, 0.8, 0.8]
