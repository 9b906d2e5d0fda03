"""The LLM example: FSDP and ODC train on uneven packs what one process trains, and what they wait for is seen."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from checkouts import stub_checkout
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Blocks, batch_of, loss_of, plan_of, seeded

from osdp.models.config import LlamaConfig
from osdp.models.llama import Llama
from osdp.models.packed_llama import PackedLlama, summed_loss
from osdp.uneven_lengths.fsdp_vs_odc import (
    Contestant,
    Outcome,
    Round,
    Setting,
    lengths_of,
    make_contestants,
    sample_tokens,
)
from osdp.uneven_lengths.lengths import LogNormal
from osdp.uneven_lengths.packing import METHODS, Cost, Deal, deal
from osdp.uneven_lengths.timeline import Timeline, gather_recordings, record_step, timelines
from runtime.torch_compat import communication_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_llm_odc.py"
SIZES = LlamaConfig(
    vocabulary_size=64,
    maximum_positions=64,
    hidden_size=16,
    layers=2,
    heads=4,
    key_value_heads=2,
    intermediate_size=32,
    rope_base=1e4,
    tied_head=False,
)
SETTING = Setting(SIZES, LogNormal(12, 0.8, 40), capacity=40, samples=7, steps=3 if THOROUGH else 2, seed=5)


CARD = {
    "schema": "osdp.model/1",
    "name": "mine",
    "family": "llama",
    "description": "a block alone",
    "source": "assumed",
    "parameters": 2 * 64 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 3 * 16,
    "sequence_length": 64,
    "config": asdict(replace(SIZES, layers=1)),
}
"""A model of a file: the least of the example is larger, and named where ranks alone find that nothing is learnt."""


# --- packs


def test_samples_of_a_pack_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    packed, plain = PackedLlama(SIZES), Llama(SIZES)
    plain.load_state_dict(packed.state_dict())
    lengths = (5, 1, 9, 2)
    samples = [torch.randint(64, (1, length)) for length in lengths]
    pack = torch.cat(samples, dim=1)
    # All but what a sample of one token has learned nothing from: it has no next one.
    losses = [plain(tokens, labels=tokens) * (tokens.shape[1] - 1) for tokens in samples if tokens.shape[1] > 1]
    loss = packed(pack, labels=pack, lengths=lengths)
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    loss.backward()
    torch.stack(losses).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(packed.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
    logits = torch.cat([plain(tokens) for tokens in samples], dim=1)
    torch.testing.assert_close(packed(pack, lengths=lengths), logits)


def test_an_empty_pack_has_no_loss_and_no_gradient() -> None:
    model = PackedLlama(SIZES)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    loss = model(tokens, labels=tokens, lengths=(1,))
    assert loss == 0
    loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


# --- training


def reference() -> tuple[list[float], dict[str, Tensor]]:
    """Train on every sample alone, in one process: the mean loss per learned token of a step, by plain SGD."""
    torch.manual_seed(SETTING.seed)
    initial = PackedLlama(SIZES).state_dict()
    model = Llama(SIZES)
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for number in range(1, SETTING.steps + 1):
        lengths = lengths_of(SETTING, number)
        samples = [
            torch.from_numpy(sample_tokens(SETTING.seed, number, i, length, 64))[None]
            for i, length in enumerate(lengths)
        ]
        logits = [model(tokens)[0, :-1] for tokens in samples]
        targets = torch.cat([tokens[0, 1:] for tokens in samples])
        loss = nn.functional.cross_entropy(torch.cat(logits), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model.state_dict()


def _train(rank: int) -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor], list[int]]]:
    """Train under every packing; return losses, parameters, and how many more packs rank 0 has than rank 1."""
    found = {}
    for packing in METHODS:
        contestants = make_contestants(SETTING)
        for name, one in contestants.items():
            one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.5)
            losses, uneven = [], []
            for number in range(1, SETTING.steps + 1):
                lengths = lengths_of(SETTING, number)
                dealt = deal(packing, lengths, 2, SETTING.capacity, Cost.of_llama(SIZES))
                losses.append(one.step(number, lengths, dealt).loss)
                uneven.append(dealt.counts[0] - dealt.counts[1])
            found[packing, name] = losses, one.model.full_state_dict(rank0_only=False), uneven
    return found


def test_both_train_what_one_process_trains() -> None:
    wanted, state = reference()
    found = run_ranks(_train, 2)[0]
    assert set(found) == {(packing, name) for packing in METHODS for name in ("FSDP", "ODC")}
    for case, (losses, parameters, _) in found.items():
        assert losses == pytest.approx(wanted, rel=1e-5), case
        for name, value in state.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6)
    # Seven samples are 4 and 3, so that counts differed.
    assert found["none", "ODC"][2] == [1] * SETTING.steps


# --- timelines


def _sleeps(rank: int, choice: str) -> tuple[tuple[Timeline, ...], dict[str, int], dict[str, int], bool]:
    """Record the second of two steps, in which rank 1 sleeps for 0.4 s before each of three micro-batches."""
    from osdp import OSDP

    model = OSDP(seeded(lambda: Blocks(frozen=False)), plan_of(Blocks(frozen=False), choice, ranks=(1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = [model.module.get_submodule(unit.modules[0]) for unit in model.schedule.units]
    before = [communication_of(unit) for unit in units]
    for sleep_s in (0.0, 0.4):
        with record_step(model) as recorder:
            for k in range(3):
                time.sleep(sleep_s * rank)
                args, kwargs = batch_of(model.module, rank, k)
                loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    calls = [call.name for call in recorder.calls]
    planned = [
        collective.operation
        for unit in model.schedule.units
        for collective in unit.collectives
        if collective.phase != "step"
    ]
    found = timelines(gather_recordings(recorder))
    counts = {name: calls.count(name) for name in sorted(set(calls))}
    restored = [communication_of(unit) for unit in units] == before
    return found, counts, {kind: 3 * planned.count(kind) for kind in sorted(set(planned))}, restored


@pytest.mark.parametrize(
    ("choice", "names", "besides", "waits_at"),
    [
        ("shard", {"all_gather": "gather", "reduce_scatter": "reduce"}, {}, 3),
        ("odc:2", {"pull": "pull", "push": "push"}, {"barrier": 2, "push": 1}, 1),
    ],
)
def test_the_wait_for_a_rank_that_sleeps_is_seen(
    choice: str, names: dict[str, str], besides: dict[str, int], waits_at: int
) -> None:
    (waits, sleeps), counts, planned, restored = run_ranks(_sleeps, 2, choice)[0]
    # Besides what is planned for micro-batches, ranks meet twice under ODC and push what they tell each other.
    assert counts == Counter({names[kind]: count for kind, count in planned.items()}) + Counter(besides)
    assert restored
    assert waits.bubble_s > 0.8  # of 1.2 s, less what it computed while the other slept
    assert sleeps.bubble_s < 0.5 * waits.bubble_s
    assert sleeps.total_s("compute") > 1.2
    # With FSDP there is a wait in each micro-batch, with ODC one at the end.
    waited = [span for span in waits.spans if span.activity == "waiting"]
    assert sum(span.end_s - span.start_s > 0.2 for span in waited) == waits_at


# --- the program


def example() -> ModuleType:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("train_llm_odc", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, real: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the example in forks, or rank 0 in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {programs.REAL_RANK: "0"} if real else {}
    return subprocess.run(
        [programs.python(), str(EXAMPLE), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n400\n30\n60\n")
    picture, traces, model = tmp_path / "steps.png", tmp_path / "traces", tmp_path / "model.yaml"
    model.write_text(json.dumps(CARD))
    done = run(
        "--model",
        "tiny" if THOROUGH else str(model),
        "--steps",
        "5",
        "--samples",
        "5",
        "--max-length",
        "40",
        "--packing",
        "ffd",
        "--json",
        "--device",
        "cpu",
        "--trace",
        str(traces),
        "--lengths",
        str(lengths),
        "--timeline",
        str(picture),
        real=THOROUGH,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["device"] == "cpu"
    assert {length for of_step in told["lengths"] for length in of_step} <= {10, 40, 3, 6}  # a tenth of the file's
    assert [len(of_step) for of_step in told["lengths"]] == [5] * 5
    assert told["contestants"]["FSDP"]["losses"] == pytest.approx(told["contestants"]["ODC"]["losses"], rel=1e-5)
    assert all(len(found["bubble_s"]) == 2 for found in told["contestants"].values())
    speed = told["speed_up"]
    assert 0 < speed["low"] <= speed["median"] <= speed["high"]
    assert told["speed_up_by_cost"] >= 1
    told_first, *steps = [line for line in done.stderr.splitlines() if line.startswith(("lengths", "step"))]
    assert "scaled so that none has more than 40 tokens" in told_first
    assert len(steps) == 5
    files = {"memory-rank0.png", "memory-rank1.png", "trace-rank0.json", "trace-rank1.json"}
    assert all({path.name for path in (traces / name).iterdir()} == files for name in ("FSDP", "ODC"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "1"], "at least 2"),
        (["--steps", "0"], "at least 1"),
        (["--model", "gpt2"], "trains Llamas"),
        (["--device", "cuda"], "no GPU"),
        (["--model", "none.yaml"], "none.yaml"),
        (["--lengths", "none.txt"], "none.txt"),
        (["--sigma", "-1"], "sigma -1"),
        (["--sigma", "1", "--lengths", "x"], "no effect"),
        (["--timeline", "a.txt"], "its format is not supported"),
        (["--steps", "4", "--trace", "traces"], "at least 5"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "start_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys, "argv", ["train_llm_odc.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        module.guarded(module.main)()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in told
    assert "Traceback" not in told


def test_what_only_ranks_find_is_told_without_a_traceback(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1\n")
    done = run("--model", "tiny", "--lengths", str(lengths))
    assert done.returncode == 2
    assert "nothing to learn" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("fsdp", "odc"), [(1.0, math.nan), (math.nan, 1.0), (math.inf, math.inf)])
def test_a_loss_that_is_no_number_differs(fsdp: float, odc: float) -> None:
    outcomes = {name: Outcome(loss, 1.0, (), False) for name, loss in (("FSDP", fsdp), ("ODC", odc))}
    assert Round(1, (), Deal((), ()), outcomes).loss_difference == math.inf


def test_packs_are_on_the_device_of_the_model() -> None:
    contestant: Any = SimpleNamespace(setting=SETTING, model=SimpleNamespace())
    contestant.model.sharded = SimpleNamespace(device=torch.device("meta"))
    for pack, tokens in (((0, 1), 7), ((), 1)):
        found, lengths = Contestant._batch(contestant, 1, (3, 4), pack)
        assert (found.device.type, found.shape) == ("meta", (1, tokens))
        assert sum(lengths) == tokens


def test_the_loss_of_a_pack_copies_nothing_to_the_device() -> None:
    """A copy from the host would wait for the device in every micro-batch."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not str(function).startswith(("aten.index_put", "aten._to_copy", "aten.lift_fresh")), function
            return function(*args, **(kwargs or {}))

    logits, labels = torch.zeros(1, 9, 4), torch.ones(1, 9, dtype=torch.int64)
    with Copies():
        loss = summed_loss(logits, labels, (4, 1, 4))
    assert loss.item() == pytest.approx(6 * math.log(4))


def test_losses_that_differ_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    module = example()
    module.check_losses(1e-5, 0)
    for difference in (2e-4, float("nan")):
        with pytest.raises(SystemExit) as ended:
            module.check_losses(difference, 0)
        assert ended.value.code == 1
        assert "differ" in capsys.readouterr().err


def test_the_script_passes_its_options_on(tmp_path: Path) -> None:
    root = stub_checkout(tmp_path)
    (root / "examples").mkdir()
    (root / "examples" / "train_llm_odc.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = subprocess.run(
        ["sh", str(root / "scripts" / "script_llm_odc_training.sh"), "--lengths", "a file"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['--lengths', 'a file']\n"
