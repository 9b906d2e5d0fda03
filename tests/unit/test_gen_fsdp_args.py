"""`gen_fsdp_args`, the strategies that its settings mean, and which modules become a unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osdp.compat.fairscale import FSDP, Groups, gen_fsdp_args, schedule_of
from osdp.compat.seed_groups import SETTINGS, grouped_strategy
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError


@pytest.mark.parametrize(
    ("setting", "nodes", "ranks", "expected"),
    [
        ("group_sharding", 2, 4, "group_shard:4"),
        ("communication_with_groups", 3, 2, "hierarchical"),
        ("none", 2, 4, "shard"),
        ("none", 1, 8, "shard"),
        ("none", 1, 1, "replicate"),
        ("group_sharding", 1, 1, "replicate"),
    ],
)
def test_settings_as_strategies(setting: str, nodes: int, ranks: int, expected: str) -> None:
    strategy = grouped_strategy(setting, nodes, ranks)
    assert str(strategy) == expected
    assert strategy.group == {"group_sharding": ranks}.get(setting, nodes * ranks)


@pytest.mark.parametrize(
    ("setting", "nodes", "ranks", "expected", "told"),
    [
        ("group_sharding", 1, 4, "shard", "no effect on one node"),
        ("communication_with_groups", 1, 4, "shard", "no effect on one node"),
        ("group_sharding", 4, 1, "replicate", "comes to replication"),
        ("communication_with_groups", 4, 1, "shard", "no effect where a node has one rank"),
    ],
)
def test_a_setting_without_groups_is_told(setting: str, nodes: int, ranks: int, expected: str, told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        assert str(grouped_strategy(setting, nodes, ranks)) == expected


def test_arguments_for_any_model() -> None:
    groups = gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type="group_sharding", model_type="bert-large")["groups"]
    assert (groups.nodes, groups.ranks_per_node, groups.strategy) == (2, 2, Strategy("group_shard", 2))
    assert groups.model == "bert-large"
    two_phase = gen_fsdp_args(2, 4, "communication_with_groups", "a model of my own")["groups"]
    assert two_phase.strategy == Strategy("hierarchical", 8)
    assert gen_fsdp_args(2, 2, "none") == {}  # fairscale's own FSDP takes it too


@pytest.mark.parametrize(
    ("nodes", "ranks", "setting", "told"),
    [
        (2, 2, "groups", "no such way to shard with groups"),
        (0, 2, "none", "at least one node"),
        (2, -1, "none", "at least one node"),
        (2, "2", "none", "nproc_per_node is no whole number"),
        (True, 2, "none", "nnodes is no whole number"),
    ],
)
def test_wrong_arguments_are_refused(nodes: int, ranks: int, setting: str, told: str) -> None:
    with pytest.raises(OsdpError, match=told) as refusal:
        gen_fsdp_args(nodes, ranks, setting)
    if "such way" in told:
        assert refusal.value.expected == ", ".join(SETTINGS)


def test_wrapping_needs_a_process_group() -> None:
    with pytest.raises(OsdpError, match="there is no process group"):
        FSDP(nn.Linear(2, 2))


SHARD = Groups(2, 2, Strategy("shard", 4))
GROUPS = Groups(2, 2, Strategy("group_shard", 2))


class Net(nn.Module):
    """Tables, layers and a head, with the parameters of every module in its own shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.middle = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(3, 7, bias=False)


def units(model: nn.Module, *chosen: nn.Module, root: Groups = SHARD) -> dict[tuple[str, ...], set[str]]:
    """Return the parameters of every unit."""
    schedule = schedule_of(model, dict.fromkeys(chosen, SHARD) | {model: root})
    return {unit.modules: {parameter.path for parameter in unit.parameters} for unit in schedule.units}


def test_a_parameter_is_in_the_innermost_chosen_module() -> None:
    net = Net()
    assert units(net, net.middle, net.middle[0]) == {
        ("",): {"table.weight", "norm.weight", "norm.bias", "head.weight"},
        ("middle",): {"middle.1.weight", "middle.1.bias"},
        ("middle.0",): {"middle.0.weight", "middle.0.bias"},
    }
    assert units(net) == {("",): {name for name, _ in net.named_parameters()}}


def test_tied_weights_are_one_unit() -> None:
    net = Net()
    net.head.weight = net.table.weight
    rest = {"middle.0.weight", "middle.0.bias", "middle.1.weight", "middle.1.bias", "norm.weight", "norm.bias"}
    assert units(net, net.table, net.head) == {("",): rest, ("head", "table"): {"table.weight"}}
    # Where the model itself has one of the places, it has the parameter.
    assert units(net, net.table) == {("",): rest | {"table.weight"}}


def test_a_module_in_two_places_is_one_unit() -> None:
    net = Net()
    net.middle[1] = net.head
    assert units(net, net.head, net.middle[0])[("middle.1",)] == {"middle.1.weight"}


def test_units_say_what_they_send() -> None:
    """A linear layer of 3 x 5 + 5 parameters: rows of 5 padded to 6 over 2 ranks, fp32."""
    net = Net()
    schedule = schedule_of(net, {net.middle[1]: GROUPS, net: SHARD})
    (unit,) = (unit for unit in schedule.units if unit.name == "middle.1")
    assert unit.strategy == Strategy("group_shard", 2)
    sent = [(c.operation, c.ranks, c.stride, c.size_bytes) for c in unit.collectives]
    size_bytes = 4 * (6 * 3 + 6)
    assert sent == [
        ("all_gather", 2, 1, size_bytes),
        ("all_gather", 2, 1, size_bytes),
        ("reduce_scatter", 2, 1, size_bytes),
        ("all_reduce", 2, 2, size_bytes // 2),
    ]
    net.middle[1].weight.requires_grad_(False)
    schedule = schedule_of(net, {net.middle[1]: GROUPS, net: SHARD})
    assert [p.trainable for unit in schedule.units if unit.name == "middle.1" for p in unit.parameters] == [False, True]


def test_wishes_that_do_not_go_together_are_refused() -> None:
    net = Net()
    net.head.weight = net.table.weight
    with pytest.raises(OsdpError, match="share parameters are wrapped in different ways"):
        schedule_of(net, {net: SHARD, net.table: SHARD, net.head: GROUPS})
    with pytest.raises(OsdpError, match="middle is wrapped for other ranks"):
        schedule_of(net, {net: SHARD, net.middle: Groups(1, 4, Strategy("shard", 4))})
    assert torch.equal(net.head.weight, net.table.weight)
