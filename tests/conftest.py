"""Settings for every test."""

from __future__ import annotations

import fcntl
import importlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import garbage
import older_torch
import programs
import pytest
import thoroughness
from command_line import cli
from hypothesis import settings

__all__ = ["cli"]  # a fixture

# The same examples on every run, and no deadline: shared CI machines stall.
settings.register_profile("osdp", deadline=None, derandomize=True)
settings.load_profile("osdp")

WORKERS, CORES = 4, 2
"""Files that run at once, and how many of those may be other than of ranks, which wait half of the time."""
LONGEST = (
    "gloo/test_seed_commands.py",
    "unit/test_html_report_browser.py",
    "unit/test_cli_questions.py",
    "unit/test_cli.py",
    "gloo/test_train_command.py",
    "gloo/test_train_runs.py",
    "unit/test_search.py",
    "unit/test_refusal.py",
    "gloo/test_parity.py",
    "gloo/test_tiny_examples.py",
    "gloo/test_odc_lost_ranks.py",
    "unit/test_memory_tracker.py",
    "gloo/test_api.py",
    "unit/test_trace_pipeline.py",
    "gloo/test_odc_library.py",
    "unit/test_space_search.py",
    "gloo/test_experts.py",
    "gloo/test_llm_odc.py",
    "unit/test_export_memory.py",
    "gloo/test_drawn_loops.py",
    "unit/test_replay.py",
    "gloo/test_any_loop.py",
    "unit/test_emulated_cluster.py",
    "gloo/test_huggingface_loops.py",
    "unit/test_imbalance_command.py",
    "unit/test_allocator_headroom.py",
    "gloo/test_real_models.py",
    "gloo/test_faults.py",
    "gloo/test_odc.py",
    "gloo/test_bert_training.py",
    "gloo/test_checkpoint_layouts.py",
    "gloo/test_linear_example.py",
    "gloo/test_lightning.py",
    "gloo/test_odc_loops.py",
    "gloo/test_checkpoint_plans.py",
    "unit/test_html_report.py",
    "gloo/test_odc_device_windows.py",
    "unit/test_data_dependent.py",
    "gloo/test_lora_example.py",
    "unit/test_memory_random.py",
    "unit/test_dtype_costs.py",
    "gloo/test_restarts.py",
    "unit/test_compute_times.py",
    "gloo/test_ring.py",
    "gloo/test_dtypes.py",
    "unit/test_recurrent_layers.py",
    "unit/test_huggingface.py",
    "unit/test_kept_graphs.py",
    "unit/test_verify_command.py",
    "unit/test_frontier.py",
    "gloo/test_odc_library_loops.py",
    "unit/test_shell_habits.py",
    "gloo/test_recovery.py",
    "gloo/test_export_fsdp2.py",
    "gloo/test_odc_windows.py",
    "gloo/test_strategies_measured.py",
    "gloo/test_drawn_models.py",
    "unit/test_offload_memory.py",
    "gloo/test_compile.py",
    "gloo/test_checkpoint_failures.py",
    "gloo/test_odc_faults.py",
    "gloo/test_fairscale.py",
    "gloo/test_transformers.py",
    "gloo/test_viewer_files.py",
    "gloo/test_waiting_ranks.py",
    "unit/test_zoo_graphs.py",
)
"""Files that take longest: ranks wait in some while others compute, and a long one that starts last runs alone."""
TIMED = ("gloo/test_profile_command.py", "gloo/test_communication_times.py")
"""Files that time what the machine can do within a budget of seconds: late, when fewer run beside them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="draw ten times as much, and run every combination")
    parser.addoption("--draw", help="of tests of drawn loops, make only this draw")


def pytest_configure(config: pytest.Config) -> None:
    if not (hasattr(config, "workerinput") or config.option.collectonly):
        if config.getoption("--thorough"):
            thoroughness.be_thorough()
        if config.getoption("--draw"):
            os.environ[thoroughness.DRAW] = config.getoption("--draw")
        os.environ["OSDP_CACHE_DIR"] = ""  # models are traced, but where a test keeps graphs
        os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other on busy cores take most of a test's time
        # Else gloo's threads put each other aside while one holds what the other asks for again and again: ranks that
        # share two cores take a third less processor time so, and every process that is started from here is so.
        with suppress(AttributeError, OSError):  # other systems than Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.environ[programs.FOLDER] = programs.make_folder()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have tests compute as ranks do; the process that only hands tests to workers imports no torch."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        importlib.import_module("quick_torch").install()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not (hasattr(config, "workerinput") or config.option.collectonly):
        shutil.rmtree(os.environ[programs.FOLDER], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Start no more workers than there are files."""
    files = [argument for argument in config.args if ".py" in argument]
    return min(WORKERS, len(files) or WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers of a run of many files off one process that has imported these; one worker has that sooner."""
    if len(specs) >= WORKERS and not programs.has_gpu():
        for spec in specs:
            spec.python = programs.worker_python(config.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and those that measure time last, with the rest of ranks and of others mixed."""
    older_torch.skip(items)
    folder = Path(__file__).parent
    last = {folder / name: len(LONGEST) + 1 + place for place, name in enumerate(TIMED)}
    order = {folder / name: place for place, name in enumerate(LONGEST)} | last
    items.sort(key=lambda item: (order.get(item.path, len(LONGEST)), item.path.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run no more tests at once than there are cores, of those that do not wait for ranks."""
    _forget_garbage(item.path)
    if item.path.parent.name == "gloo":
        return (yield)
    for core in itertools.cycle(_cores()):
        with suppress(BlockingIOError), _held(core):
            return (yield)
        if core == _cores()[-1]:
            time.sleep(0.05)


@cache
def _cores() -> list[int]:
    """Open a file for each core, which whoever computes on it has locked; opened again and again, they take 1 %."""
    paths = (Path(os.environ[programs.FOLDER], f"core{number}") for number in range(CORES))
    return [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in paths]


@contextmanager
def _held(core: int) -> Iterator[None]:
    """Hold a core; raises BlockingIOError if another process does."""
    fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        fcntl.flock(core, fcntl.LOCK_UN)


@cache
def _forget_garbage(before: Path) -> None:
    """Have collections skip what there is before a file's first test."""
    garbage.set_aside()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the kernels of `cuda/`, built for `host_device.HostDevice`."""
    from host_device import build_kernels  # it imports torch, which not every process of a test run does

    return build_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def prefix() -> str:
    """Begin the names of all memory of a test's `HostDevice`."""
    return f"osdp-test-{os.getpid()}-{time.monotonic_ns()}"
