"""How two plans differ, from their files alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.plan_diff import ChoiceChange, Delta, SettingChange, compare
from planner.plan import Asked, ClusterRef, ModelRef, Plan, Prediction

INSIDE = ("norm", "attn.qkv", "mlp.up")
NAMES = ("wte", *(f"h.{block}.{name}" for block in range(4) for name in INSIDE), "ln_f")


def plan(**changes: object) -> Plan:
    """A plan of four blocks, everything sharded, blocks 0 and 1 recomputed."""
    predicted = Prediction(
        peak_memory_bytes=1000,
        memory_by_category={"parameters": 400, "activations": 500, "reserve": 100},
        peak_phase="backward of wte",
        step_time_s=2.0,
        time_by_term={"compute_s": 1.5, "exposed_communication_s": 0.5, "hidden_communication_s": 9.0},
        samples_per_s=8.0,
    )
    made = Plan(
        schema=Plan.SCHEMA,
        model=ModelRef("gpt2", "abc", 1_000_000, 128, "fp32"),
        cluster=ClusterRef("box", "def", 1, 8),
        optimizer="adam",
        limit_bytes=1200,
        micro_batch=2,
        accumulation=1,
        predicted=predicted,
        gap=0.01,
        choices=dict.fromkeys(NAMES, "shard"),
        recomputed_blocks=["h.0", "h.1"],
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_plan_does_not_differ_from_itself() -> None:
    found = compare(plan(), plan())
    assert found.is_empty
    assert (found.settings, found.choices, found.changed_operators) == ((), (), 0)
    assert all(delta.change == 0 for delta in (*found.memory, *found.time, found.peak_bytes, found.samples_per_s))


def test_settings_that_differ_are_told() -> None:
    other = plan(
        micro_batch=4,
        accumulation=3,
        limit_bytes=1300,
        headroom_bytes=50,
        optimizer="sgd",
        cluster=ClusterRef("box", "def", 2, 8),
        asked=Asked(pins=["h.0=keep", "wte=shard"]),
    )
    assert compare(plan(), other).settings == (
        SettingChange("ranks", "1 x 8", "2 x 8"),
        SettingChange("optimizer", "adam", "sgd"),
        SettingChange("limit_bytes", 1200, 1300),
        SettingChange("headroom_bytes", 0, 50),
        SettingChange("pins", "none", "h.0=keep, wte=shard"),
        SettingChange("micro_batch", 2, 4),
        SettingChange("accumulation", 1, 3),
    )


def test_blocks_that_change_alike_are_one_row() -> None:
    choices = dict.fromkeys(NAMES, "shard")
    choices |= {f"h.{block}.{name}": "replicate" for block in (0, 1) for name in INSIDE}
    choices |= {f"h.{block}.mlp.up": "split(2*shard)" for block in (2, 3)} | {"wte": "shard_grad"}
    found = compare(plan(), plan(choices=choices, recomputed_blocks=["h.1", "h.3"]))
    assert found.choices == (
        ChoiceChange((), ("wte",), "shard", "shard_grad"),
        ChoiceChange((), ("h.0", "h.1"), "shard", "replicate"),
        ChoiceChange(("mlp.up",), ("h.2", "h.3"), "shard", "split(2*shard)"),
        ChoiceChange((), ("h.3",), "kept", "recomputed"),
        ChoiceChange((), ("h.0",), "recomputed", "kept"),
    )
    assert found.changed_operators == 1 + 2 * len(INSIDE) + 2
    assert not found.is_empty


def test_memory_and_time_differ_by_category_and_term() -> None:
    predicted = Prediction(
        900,
        {"parameters": 350, "activations": 450, "window": 100},
        "optimizer",
        1.5,
        {"compute_s": 1.5, "recompute_s": 0.0, "hidden_communication_s": 0.0},
        12.0,
    )
    found = compare(plan(), plan(predicted=predicted))
    assert {delta.name: delta.change for delta in found.memory} == {
        "parameters": -50,
        "activations": -50,
        "reserve": -100,
        "window": 100,
    }
    assert sum(delta.change for delta in found.memory) == found.peak_bytes.change == -100
    # Hidden communication is no part of the step, so the terms sum to it.
    assert [delta.name for delta in found.time] == ["compute_s", "exposed_communication_s", "recompute_s"]
    assert sum(delta.change for delta in found.time) == found.step_time_s.change == -0.5
    assert found.samples_per_s == Delta("samples/s", 8.0, 12.0)


def test_plans_of_different_models_are_not_compared_by_choice() -> None:
    other = plan(model=ModelRef("bert", "xyz", 5, 128, "fp32"), choices={"embed": "shard"}, recomputed_blocks=[])
    found = compare(plan(), other)
    assert not found.same_operators
    assert not found.is_empty
    assert (found.choices, found.changed_operators) == ((), 0)
    assert SettingChange("model", "gpt2", "bert") in found.settings
    assert found.peak_bytes == Delta("peak", 1000, 1000)


def test_the_same_operators_traced_otherwise_are_compared() -> None:
    longer = plan(model=ModelRef("gpt2", "fff", 1_000_000, 256, "bf16"))
    found = compare(plan(), longer)
    assert found.same_operators
    assert [change.setting for change in found.settings] == ["sequence_length", "precision", "model_fingerprint"]


paths = st.lists(st.sampled_from(["h", "0", "1", "2", "mlp", "up"]), min_size=1, max_size=5).map(".".join)
strategies = st.sampled_from(["shard", "replicate", "shard_grad"])


@given(st.dictionaries(paths, st.tuples(strategies, strategies), min_size=1, max_size=20))
def test_every_change_is_in_one_row_and_nothing_else_is(both: dict[str, tuple[str, str]]) -> None:
    old = {name: before for name, (before, _) in both.items()}
    new = {name: after for name, (_, after) in both.items()}
    found = compare(plan(choices=old), plan(choices=new))
    told: dict[str, tuple[str, str]] = {}
    for row in found.choices:
        for block in row.names:
            is_block = block.rpartition(".")[2].isdecimal()
            inside = [name for name in both if name == block or (is_block and name.startswith(f"{block}."))]
            members = [f"{block}.{rest}" if rest else block for rest in row.operators] if row.operators else inside
            for name in members:
                assert name not in told
                told[name] = (row.before, row.after)
    assert told == {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    assert found.changed_operators == len(told)


@pytest.mark.parametrize("name", ["layers.0", "0", "wte"])
def test_a_block_may_be_one_operator(name: str) -> None:
    found = compare(plan(choices={name: "shard"}), plan(choices={name: "owner"}))
    assert found.choices[0] == ChoiceChange((), (name,), "shard", "owner")
