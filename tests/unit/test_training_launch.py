"""What the launcher says of failed ranks, where nodes stand, and plan files that do not fit a run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from osdp.planning.plan_file import write_plan
from osdp.planning.request import Request, plan_model
from osdp.training.allocator_settings import NAMES, use_expandable_segments
from osdp.training.config import load_config
from osdp.training.job import check_ranks, prepare
from osdp.training.launch import _SHUTDOWN_S, LAUNCHED, Nodes, RankError, _cause, _settings, launch, leave_error
from osdp.zoo import load_cluster, load_model
from profiler.errors import FaultError, OsdpError

KILLED, TERMINATED, ABORTED = -9, -15, -6


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes the failure of one rank."""

    def make(rank: int, exitcode: int, error: Exception | None = None) -> ProcessFailure:
        path = tmp_path / str(rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if error is not None:
            leave_error(error, exitcode if exitcode > 0 else 2)
        return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(path))

    return make


def cause(*failures: ProcessFailure) -> Exception:
    return _cause(ChildFailedError("osdp", {failure.local_rank: failure for failure in failures}))


def test_the_users_mistake_is_told_as_it_was(failed: Any) -> None:
    mistake = OsdpError("no", got="x", expected="y", advice="z")
    told = cause(failed(0, TERMINATED), failed(1, 2, mistake))
    assert isinstance(told, OsdpError)
    assert str(told) == "no\n  got: x\n  expected: y\n  try: z"


def test_a_rank_that_is_ended_while_it_writes_its_error_leaves_none(tmp_path: Path, failed: Any) -> None:
    """The agent reads what there is, and fails itself at half a file: the first one's error was lost so."""
    with mock.patch("os.replace", side_effect=SystemExit(1)), pytest.raises(SystemExit):
        failed(1, TERMINATED, OsdpError("no"))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_comes_before_what_its_peers_say_of_it(failed: Any) -> None:
    peer, agreed = failed(0, 1, OsdpError("lost rank 2")), failed(1, 2, OsdpError("cannot save"))
    told = cause(peer, agreed, failed(2, KILLED), failed(3, TERMINATED))
    assert isinstance(told, RankError)
    assert str(told).startswith("rank 2 was killed by SIGKILL")


def test_a_mistake_counts_though_the_agent_has_ended_its_rank(failed: Any) -> None:
    """Where a rank has left its error, and its peer lost it and ended sooner."""
    peer = failed(1, 1, FaultError("rank 0 is gone"))
    assert str(cause(failed(0, TERMINATED, OsdpError("no such strategy")), peer)) == "no such strategy"


def test_a_rank_that_aborts_as_its_peer_ends_is_not_the_cause(failed: Any) -> None:
    """As gloo does where a rank connects to one that has found a mistake and ended."""
    mistake, aborted = failed(0, 2, OsdpError("no such strategy")), failed(1, ABORTED)
    aborted.timestamp = mistake.timestamp
    assert str(cause(mistake, aborted)) == "no such strategy"
    assert not isinstance(cause(mistake, aborted), RankError)
    aborted.timestamp = mistake.timestamp - 1  # it did so before
    assert str(cause(mistake, aborted)).startswith("rank 1 was killed by SIGABRT")
    peer = failed(0, 1, OsdpError("lost rank 1"))
    aborted.timestamp = peer.timestamp
    assert str(cause(peer, aborted)).startswith("rank 1 was killed by SIGABRT")


def test_a_fault_is_no_bad_input(failed: Any) -> None:
    told = cause(failed(0, 1, ZeroDivisionError("division by zero")), failed(1, TERMINATED))
    assert isinstance(told, RankError)
    assert "ZeroDivisionError: division by zero" in str(told)


def test_a_death_without_a_word(failed: Any) -> None:
    assert str(cause(failed(3, 7))) == "rank 3 ended with exit status 7; what it printed is above"
    assert isinstance(cause(failed(0, 141)), BrokenPipeError)


def test_the_error_file_is_in_the_agents_form(failed: Any, tmp_path: Path) -> None:
    failed(0, 2, OsdpError("no"))
    message = json.loads((tmp_path / "0").read_text())["message"]
    assert message["message"] == "no"
    assert int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize(
    ("count", "index", "endpoint"),
    [(1, 1, ""), (2, 0, ""), (2, 0, "host"), (2, 2, "host:1"), (2, 0, "host:0"), (2, 0, "host:65536")],
)
def test_nodes_that_cannot_be(count: int, index: int, endpoint: str) -> None:
    with pytest.raises(OsdpError):
        Nodes(count, index, endpoint)


def test_settings_of_a_torch_without_a_timeout_for_shutdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torch 2.11 has it."""
    fields = [
        (field.name, field.type, dataclasses.field(default=field.default, default_factory=field.default_factory))
        for field in dataclasses.fields(api.LaunchConfig)
        if field.name != "shutdown_timeout"
    ]
    monkeypatch.setattr(api, "LaunchConfig", dataclasses.make_dataclass("LaunchConfig", fields))
    for nodes in (Nodes(endpoint="host:1"), Nodes(2, 1, "host:1")):
        found = _settings(3, nodes, 60.0, str(tmp_path))
        assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (nodes.count, nodes.count, 3)
        assert not hasattr(found, "shutdown_timeout")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("given", "threads"), [(None, "3"), ("1", "1")])
def test_ranks_share_the_cores(device: str, given: str | None, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on GPUs too: what is offloaded is stepped on the host."""
    for name in ("OMP_NUM_THREADS", LAUNCHED):
        monkeypatch.setenv(name, given or "")  # so that it is put back afterwards
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 13)
    seen: list[str] = []
    monkeypatch.setattr(api, "elastic_launch", lambda *_: lambda *_: seen.append(os.environ["OMP_NUM_THREADS"]))
    launch(["train"], 4, Nodes(), device, 60.0)
    assert seen == [threads]


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": ""}])
def test_segments_of_the_allocator_grow_unless_the_user_says_something(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is put back afterwards
        if name not in given:
            monkeypatch.delenv(name)
    use_expandable_segments()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_plan_files_must_fit_the_run(tmp_path: Path) -> None:
    cluster = load_cluster("cpu-gloo", gpus_per_node=2)
    source = load_model("gpt2-tiny", sequence_length=7)
    plan = plan_model(source, cluster, Request(1 << 30, "fp32", "adamw", micro_batch=4, global_batch=16)).plan
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    options = {"plan": str(path), "global_batch": 16}
    job = prepare(load_config("gpt2", options))
    assert job.plan == plan
    check_ranks(plan, 1, 2)
    with pytest.raises(OsdpError, match="another number of ranks"):
        check_ranks(plan, 2, 2)
    for wrong, told in (
        ({"optimizer": "sgd"}, "for another optimizer"),
        ({"precision": "bf16"}, "for another precision"),
        ({"batch": 8}, "for another batch"),
        ({"global_batch": 8}, "for another global batch"),
        ({"seq": 14}, "samples of another length"),
    ):
        with pytest.raises(OsdpError, match=told):
            prepare(load_config("gpt2", options | wrong))
    write_plan(path, dataclasses.replace(plan, accumulation=1))
    with pytest.raises(OsdpError, match="for another global batch"):
        prepare(load_config("gpt2", options))


def test_what_the_agent_kills_is_not_the_cause(failed: Any) -> None:
    """A rank that is stopped does not hear SIGTERM, and so gets SIGKILL, long after its peers have named it."""
    stopped = failed(1, KILLED)
    peer = failed(0, 1, FaultError("rank 0 failed in all_gather during step 3: rank 1 is stopped"))
    stopped.timestamp = peer.timestamp + _SHUTDOWN_S
    assert "rank 1 is stopped" in str(cause(peer, stopped))
    stopped.timestamp = peer.timestamp + 1  # killed by the system: its peers found out meanwhile
    assert str(cause(peer, stopped)).startswith("rank 1 was killed by SIGKILL")
