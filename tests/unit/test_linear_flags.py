"""The linear example without ranks: its flags and sizes, which layers form a unit, and the tutorial's keys."""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import examples_path
import pytest
import torch
from linear_example.flags import DATA_PARALLEL, parse, without_effect
from linear_example.fsdp import group_layers
from linear_example.memory import memory_at, resident_bytes
from linear_example.model import LinearStack, make_data
from linear_example.train import main

from osdp.cli.exits import status_of

GIB = 2**30
KEYS = [
    "stage",
    "rank",
    "log_key",
    "cuda_memory_allocated_GB",
    "cuda_max_memory_allocated_GB",
    "cuda_memory_reserved_GB",
    "cuda_max_memory_reserved_GB",
    "cpu_memory_rss_GB",
]
"""Of the dictionaries that the tutorial shows, in its order."""


def warned(*flags: str, device: str = "cuda", ranks: int = 2) -> str:
    """Return what is said of flags without effect."""
    return "\n".join(without_effect(parse(flags, device), device, ranks))


# ---- Flags ---------------------------------------------------------------------------------------


def test_the_defaults_are_the_tutorials() -> None:
    options = parse([], "cuda")
    assert (options.data_parallel, options.auto_wrap_policy) == ("fsdp", "module_wrap")
    assert (options.backward_prefetch, options.forward_prefetch, options.cpu_offload) == ("BACKWARD_PRE", False, False)
    assert (options.batch_size, options.min_num_params) == (8192, 100_000_000)


def test_a_smaller_model_has_units_of_the_same_share() -> None:
    """A layer of 256 features has 4096 times fewer weights than one of 16384."""
    options = parse([], "cpu")
    assert options.hidden == 256
    assert options.min_num_params == 100_000_000 // 4096
    assert parse(["--hidden", "16384"], "cpu").min_num_params == 100_000_000
    assert parse(["--min_num_params", "7"], "cpu").min_num_params == 7


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--data_parallel", "zero"], "--data_parallel: invalid choice: 'zero'"),
        (["--backward_prefetch", "backward_pre"], "--backward_prefetch: invalid choice: 'backward_pre'"),
        (["--auto_wrap_policy", "block"], "--auto_wrap_policy: invalid choice: 'block'"),
        (["--batch_size", "0"], "--batch_size: '0' is not a whole number of at least 1"),
        (["--min_num_params", "1e8"], "--min_num_params: '1e8' is not a whole number of at least 1"),
        (["--warmup_steps", "1"], "--warmup_steps: at least 2"),
        (["--mem", "much"], "--mem: "),
        (["--compare", "--data_parallel", "ddp"], "not allowed with argument"),
        (["--cpu-offlod"], "unrecognized arguments: --cpu-offlod"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags, "cpu")
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_flags_without_effect_are_told() -> None:
    assert "--cpu_offload has no effect on CPU ranks" in warned("--cpu_offload", device="cpu")
    assert "no effect on one rank" in warned("--forward_prefetch", ranks=1)
    assert "one unit has no next one" in warned("--auto_wrap_policy", "none", "--backward_prefetch", "NONE")
    assert "--mem has no effect with --data_parallel fsdp" in warned("--mem", "8GB")
    everything = ["--cpu_offload", "--forward_prefetch", "--backward_prefetch", "NONE", "--auto_wrap_policy", "none"]
    told = warned("--data_parallel", "ddp", *everything)
    assert re.findall(r"^(--\S+) has no effect .*: DDP does not shard$", told, re.MULTILINE) == [
        "--cpu_offload",
        "--forward_prefetch",
        "--backward_prefetch",
        "--auto_wrap_policy",
    ]
    assert warned("--data_parallel", "osdp", "--cpu_offload").endswith("OSDP plans that by itself")


def test_flags_with_an_effect_are_not_told() -> None:
    everything = ["--cpu_offload", "--forward_prefetch", "--backward_prefetch", "NONE"]
    assert warned(*everything) == ""
    assert warned("--compare", "--mem", "8GB", *everything) == ""
    assert warned("--data_parallel", "osdp", "--mem", "8GB") == ""
    assert warned("--data_parallel", "ddp", device="cpu", ranks=1) == ""


def test_every_configuration_has_a_folder_of_its_own() -> None:
    settings = product(
        [False, True], [False, True], ["BACKWARD_PRE", "BACKWARD_POST", "NONE"], ["module_wrap", "none"], [1024, 8192]
    )
    base = parse([], "cuda")
    names = {
        replace(
            base,
            cpu_offload=offload,
            forward_prefetch=forward,
            backward_prefetch=backward,
            auto_wrap_policy=policy,
            batch_size=batch,
        ).configuration
        for offload, forward, backward, policy, batch in settings
    }
    sized = {replace(base, auto_wrap_policy="size_based", min_num_params=size).configuration for size in (1, 2)}
    kinds = {replace(base, data_parallel=kind).configuration for kind in DATA_PARALLEL}
    assert len(names | sized | kinds) == 48 + 2 + 2  # fsdp with defaults is one of the 48


def test_the_documentation_has_every_flag_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], "cpu")
    flags = set(re.findall(r"--[a-z_]+", capsys.readouterr().out)) - {"--help"}
    page = (examples_path.EXAMPLES.parent / "docs" / "tutorial.md").read_text()
    assert set(re.findall(r"^\| `(--[a-z_]+)` \|.*\|$", page, re.MULTILINE)) == flags


# ---- Sizes and units -----------------------------------------------------------------------------


def test_the_full_size_is_what_the_tutorial_shows_after_model_creation() -> None:
    options = parse([], "cuda")
    with torch.device("meta"):
        model = LinearStack(options.layers, options.hidden)
    numbers = sum(parameter.numel() for parameter in model.parameters()) + 2 * options.batch_size * options.hidden
    assert 4 * numbers / GIB == 9.00048828125


def test_data_is_of_the_batch_and_every_rank_has_its_own() -> None:
    cpu = torch.device("cpu")
    x, target = make_data(5, 3, 0, cpu)
    assert x.shape == target.shape == (5, 3)
    assert not torch.equal(x, target)
    assert not torch.equal(x, make_data(5, 3, 1, cpu)[0])
    assert torch.equal(x, make_data(5, 3, 0, cpu)[0])


@pytest.mark.parametrize(
    ("policy", "least", "units"),
    [
        ("module_wrap", 10**9, [[0], [1], [2], [3], [4]]),
        ("size_based", 1, [[0], [1], [2], [3], [4]]),
        ("size_based", 20, [[0], [1], [2], [3], [4]]),
        ("size_based", 21, [[0, 1], [2, 3]]),  # the fifth is the root's
        ("size_based", 40, [[0, 1], [2, 3]]),
        ("size_based", 41, [[0, 1, 2]]),
        ("size_based", 101, []),
        ("none", 1, []),
    ],
)
def test_units_grow_to_the_size_asked_for(policy: str, least: int, units: list[list[int]]) -> None:
    """Five layers of 4 features, 4 x 4 + 4 = 20 parameters each."""
    model = LinearStack(5, 4)
    found = group_layers(model, policy, least)
    assert [[list(model.layers).index(layer) for layer in unit] for unit in found] == units


def test_layers_of_the_model_are_linear() -> None:
    """(I + 1) (3 I) x with biases 0 and 0: the model is the product of its matrices."""
    model = LinearStack(2, 2)
    with torch.no_grad():
        for layer, matrix in zip(model.layers, ([[1.0, 1.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 3.0]]), strict=True):
            layer.weight.copy_(torch.tensor(matrix))
            layer.bias.zero_()
    # x = (1, 2) -> (3, 2) -> (9, 6); target (8, 6): ((9 - 8)^2 + 0) / 2
    assert model(torch.tensor([[1.0, 2.0]]), torch.tensor([[8.0, 6.0]])).item() == 0.5


# ---- Memory --------------------------------------------------------------------------------------


def test_on_a_cpu_the_keys_are_the_tutorials_without_those_of_cuda() -> None:
    told = memory_at("after warmup", 3, torch.device("cpu"))
    assert list(told) == [key for key in KEYS if not key.startswith("cuda")]
    assert (told["stage"], told["rank"], told["log_key"]) == ("after warmup", 3, "memory")


def test_resident_memory_grows_by_what_is_written() -> None:
    status = Path("/proc/self/status").read_text()
    told_kib = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])
    before_bytes = resident_bytes()
    assert before_bytes == pytest.approx(1024 * told_kib, rel=0.05)
    with mmap.mmap(-1, 64 << 20) as held:  # not of memory that was there before
        for _ in range(64):
            held.write(bytes(1 << 20))
        assert resident_bytes() - before_bytes == pytest.approx(64 << 20, rel=0.1)


def test_with_cuda_the_keys_are_all_the_tutorials_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "memory_allocated": 9.00048828125,
        "max_memory_allocated": 26.595459938049316,
        "memory_reserved": 9.001953125,
        "max_memory_reserved": 29.015625,
    }
    for name, gib in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, gib=gib: gib * GIB)
    told = memory_at("after warmup", 0, torch.device("cuda", 0))
    assert list(told) == KEYS
    assert list(told.values())[3:7] == list(figures.values())


def test_what_runs_leave_behind_is_ignored_by_git() -> None:
    assert f"{parse([], 'cpu').profile_dir}/" in (examples_path.EXAMPLES / ".gitignore").read_text().split()


def test_without_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert status_of(lambda: main([])) == 2
    assert "try: torchrun" in capsys.readouterr().err
