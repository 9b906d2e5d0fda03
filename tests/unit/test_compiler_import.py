"""Recomputed blocks are traced without torch's compiler, which stays as it was for whoever compiles later."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[[str], list[str]]
"""Runs a program and returns the words that it prints."""
CHECKOUT = Path(__file__).resolve().parents[2]
FORKS = """
import contextlib, io, json, os, sys, traceback
import torch
from profiler.trace.compiler_import import without_compiler

for line in sys.stdin:
    reading, writing = os.pipe()
    if os.fork() == 0:
        printed, status = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(printed):
                exec(json.loads(line), {"sys": sys, "torch": torch})
        except BaseException:
            status = 1
            printed.write(traceback.format_exc())
        os.write(writing, json.dumps([printed.getvalue(), status]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        print(told.read(), flush=True)
    os.wait()
"""
RECOMPUTED = """
from torch import nn
from torch.utils.checkpoint import checkpoint
from profiler.trace.compiler_import import without_compiler

layer = nn.Linear(3, 2)
def step():
    out = checkpoint(layer, torch.ones(4, 3), use_reentrant=False, preserve_rng_state=False)
    out.sum().backward()
    return layer.weight.grad.sum().item()
"""


@pytest.fixture(scope="module")
def torch_alone() -> Iterator[Run]:
    """Return what runs a program as a fork of a process that has imported torch, and nothing of its compiler."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        sends, tells = server.stdin, server.stdout

        def run(program: str) -> list[str]:
            print(json.dumps(RECOMPUTED + program), file=sends, flush=True)
            printed, status = json.loads(tells.readline())
            assert status == 0, printed
            return str(printed).split()

        yield run
        sends.close()


@pytest.fixture(scope="module")
def told(torch_alone: Run) -> list[str]:
    """Return what a program prints that recomputes before and after it imports the compiler, which takes 2 s."""
    program = """
with without_compiler():
    print(step(), "torch._dynamo" in sys.modules)
print("_dynamo" in vars(torch), hasattr(checkpoint.__wrapped__, "__dynamo_disable"))
print(torch._dynamo.config is sys.modules["torch._dynamo.config"], step())
real = torch._dynamo
with without_compiler():
    print(torch._dynamo is real, step(), hasattr(checkpoint.__wrapped__, "__dynamo_disable"))
"""
    return torch_alone(program)


def test_recomputation_does_not_import_the_compiler_and_leaves_nothing_behind(told: list[str]) -> None:
    # Six gradients of 4 samples of ones; without the context a second step adds as much.
    assert told[:6] == ["24.0", "False", "False", "False", "True", "48.0"]


def test_whatever_else_is_asked_of_the_compiler_is_its_own(torch_alone: Run) -> None:
    program = """
with without_compiler():
    asked = torch._dynamo.is_compiling
    print(asked is sys.modules["torch._dynamo"].is_compiling, torch._dynamo.config.cache_size_limit)
    before = step()
    import torch._dynamo
    print(torch._dynamo is sys.modules["torch._dynamo"])
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config.cache_size_limit, before)
"""
    asked, limit, imported, after, same_limit, gradient = torch_alone(program)
    assert (asked, imported, after, gradient) == ("True", "True", "True", "24.0")
    assert limit == same_limit


def test_a_compiler_that_is_there_is_used(told: list[str]) -> None:
    assert told[6:] == ["True", "72.0", "True"]
