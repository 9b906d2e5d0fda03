"""`osdp strategies` and `osdp partition`: figures worked out from the model's tensors, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Cli
from torch import Tensor, nn
from toys import Toy, cluster_of, graph_of

from osdp.planning.request import Request
from osdp.planning.strategy_footprint import NO_LIMIT_BYTES, predict
from osdp.zoo import load_model
from profiler.errors import OsdpError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiny-fsdp.md"
ON_TWO = ("--cluster", "cpu-gloo", "--gpus-per-node", "2")
NUMEL = 241_024
"""Parameters of gpt2-tiny, as its file derives; all first dimensions are even, so that halves need no padding."""


def tiny() -> nn.Module:
    """Return gpt2-tiny without data."""
    with torch.device("meta"):
        return load_model("gpt2-tiny").build()


def rounded(parts: int, extra: int = 0) -> int:
    """Return the bytes of a part of every tensor in fp32, and of another tensor for each, in blocks of 512."""
    sizes = [4 * parameter.numel() // parts for parameter in tiny().parameters()]
    return sum(-(-size // 512) * 512 + extra for size in sizes)


def test_what_is_kept_and_sent(cli: Cli) -> None:
    told = cli.json("strategies", "--model", "gpt2-tiny", *ON_TWO)
    assert (told["parameters"], told["ranks"], told["precision"]) == (NUMEL, 2, "fp32")
    found = {one["strategy"]: one["predicted"] for one in told["strategies"]}
    assert list(found) == ["replicate", "owner", "shard"]
    whole = 4 * NUMEL
    assert found["replicate"]["sent_bytes"] == {"forward": {}, "backward": {"all_reduce": whole}, "step": {}}
    assert found["owner"]["sent_bytes"] == {
        "forward": {"broadcast": whole},
        "backward": {"broadcast": whole, "reduce": whole},
        "step": {},
    }
    assert found["shard"]["sent_bytes"] == {
        "forward": {"all_gather": whole},
        "backward": {"all_gather": whole, "reduce_scatter": whole},
        "step": {},
    }
    # Adam keeps two moments of every tensor, and a counter that takes a block of its own.
    assert found["replicate"]["parameters_bytes"] == rounded(1)
    assert found["replicate"]["optimizer_bytes"] == 2 * rounded(1) + rounded(1, 512) - rounded(1)
    assert found["shard"]["parameters_bytes"] == rounded(2)
    assert found["shard"]["optimizer_bytes"] == 2 * rounded(2) + rounded(2, 512) - rounded(2)
    # One of the two owners has the larger half: at least half, at most half and the largest tensor.
    assert whole / 2 <= found["owner"]["parameters_bytes"] <= rounded(1) / 2 + 4 * 512 * 64
    for one in told["strategies"]:
        assert one["measured"] is None


def test_bf16_halves_what_is_gathered_but_not_what_is_reduced(cli: Cli) -> None:
    told = cli.json("strategies", "--model", "gpt2-tiny", *ON_TWO, "--precision", "bf16", "--strategy", "shard_grad")
    (found,) = told["strategies"]
    assert found["predicted"]["sent_bytes"] == {
        "forward": {"all_gather": 2 * NUMEL},
        "backward": {"reduce_scatter": 4 * NUMEL},
        "step": {},
    }


def test_the_optimizers_states_are_the_optimizers(cli: Cli) -> None:
    told = cli.json("strategies", "--model", "gpt2-tiny", *ON_TWO, "--optimizer", "sgd")
    assert [one["predicted"]["optimizer_bytes"] for one in told["strategies"]] == [0, 0, 0]


def test_one_rank_has_one_strategy(cli: Cli) -> None:
    told = cli.json("strategies", "--model", "gpt2-tiny", "--cluster", "cpu-gloo", "--gpus-per-node", "1")
    assert [one["strategy"] for one in told["strategies"]] == ["replicate"]


def test_the_tables(cli: Cli) -> None:
    out = cli.done("strategies", "--model", "gpt2-tiny", *ON_TWO)
    assert "all-gather 0.9 MiB, reduce-scatter 0.9 MiB" in out
    assert "(1.01 P)" in out
    assert "measured" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--strategy", "sharp"), "no such strategy"),
        (("--strategy", "shard", "--gpus-per-node", "1"), "shard needs several ranks"),
        (("--strategy", "group_shard:2+offload", "--gpus-per-node", "1"), "group_shard:2+offload needs several ranks"),
        (("--strategy", "owner@0", "--gpus-per-node", "1"), "owner@0 needs several ranks"),
        (("--strategy", "sharp", "--gpus-per-node", "1"), "no such strategy"),
        (("--strategy", "shard+typo", "--gpus-per-node", "1"), "no such strategy"),
        (("--strategy", "replicate:2", "--gpus-per-node", "1"), "no such strategy"),
        (("--measure", "--nodes", "2"), "on this machine only"),
        (("--precision", "fp8"), "precision"),
        (("--optimizer", "lion"), "optimizer"),
    ],
)
def test_what_is_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    assert words in cli.refused("strategies", "--model", "gpt2-tiny", *arguments)


def test_windows_cannot_be_counted() -> None:
    from osdp.planning.request import Request
    from osdp.planning.strategy_footprint import NO_LIMIT_BYTES, count, predict
    from osdp.training.process_group import Ranks
    from osdp.zoo import load_cluster
    from profiler.trace.trace import trace_model

    cluster, source = load_cluster("cpu-gloo", 1, 2), load_model("gpt2-tiny")
    found = predict(trace_model(source, "fp32"), cluster, "odc:2", Request(NO_LIMIT_BYTES, micro_batch=1))
    with pytest.raises(OsdpError, match="cannot be measured"):
        count(source, found, cluster, Ranks(0, 2, torch.device("cpu")))


def test_the_balance_of_owners(cli: Cli) -> None:
    told = cli.json("partition", "--model", "gpt2-tiny", "--ranks", "2", "--ranks", "3")
    rows = told["partitions"]
    assert [(row["ranks"], row["evenness_priority"]) for row in rows] == [
        (ranks, priority) for ranks in (2, 3) for priority in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for row in rows:
        assert sum(row["bytes_by_rank"]) == 4 * NUMEL
        assert row["max_over_mean"] == pytest.approx(max(row["bytes_by_rank"]) * row["ranks"] / (4 * NUMEL))
    for ranks in (2, 3):
        evenness = [row["max_over_mean"] for row in rows if row["ranks"] == ranks]
        assert evenness == sorted(evenness, reverse=True)
    assert rows[0]["neighbours_parted"] == 1
    out = cli.done("partition", "--model", "gpt2-tiny", "--by-module")
    assert [line[:5].strip() for line in out.splitlines() if line[:5].strip().isdecimal()] == list("2345678")
    assert f"{rows[0]['max_over_mean']:.4f} (1)" in cli.done("partition", "--model", "gpt2-tiny")


def test_the_page_shows_what_is_predicted(cli: Cli) -> None:
    """Without the lines of what was measured beside."""
    table = cli.done("strategies", "--model", "gpt2", "--seq", "64", *ON_TWO)
    page = [line.rstrip() for line in PAGE.read_text().splitlines()]
    rows = [line.rstrip() for line in table.splitlines() if "predicted" in line]
    assert len(rows) == 6
    assert [row for row in rows if row not in page] == []


def test_the_page_shows_the_balance(cli: Cli) -> None:
    printed = [line.rstrip() for line in cli.done("partition", "--model", "gpt2").splitlines()]
    assert "\n".join(printed) in PAGE.read_text()


def test_owners_that_are_given_hold_what_is_predicted(cli: Cli) -> None:
    pins = ("--pin", "wte=owner@1", "--pin", "blocks.*=owner@1", "--pin", "wpe=owner@2", "--pin", "norm=shard")
    cli.done(
        "plan",
        "--model",
        "gpt2-tiny",
        "--cluster",
        "cpu-gloo",
        "--gpus-per-node",
        "4",
        "--batch",
        "2",
        *pins,
        "-o",
        "plan.yaml",
    )
    told = cli.json("verify", "plan.yaml", "--device", "fake")
    assert (told["rank"], told["holds"]) == (1, True)
    # All but the positions, which another rank owns, and the last norm, which all share.
    assert told["tracked"]["parameters"] > rounded(1) - 4 * (128 * 64 + 2 * 64)


class Scaled(Toy):
    """A layer and a parameter without dimensions, which no unit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        return (self.layer(x) * self.scale).pow(2).mean()


@pytest.mark.parametrize("strategy", ["replicate", "owner", "shard"])
def test_parameters_outside_of_units_are_counted(strategy: str) -> None:
    """Each takes a block of 512 bytes: weight, bias, and the scale with two moments, counter and two gradients."""
    found = predict(graph_of(Scaled()), cluster_of(1, 2), strategy, Request(NO_LIMIT_BYTES)).predicted
    assert found.kept_bytes["parameters"] == 2 * 512 + 6 * 512
