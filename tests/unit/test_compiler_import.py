"""Recomputed blocks are traced without torch's compiler, which stays as it was for whoever compiles later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RECOMPUTED = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from profiler.trace.compiler_import import without_compiler

layer = nn.Linear(3, 2)
def step():
    out = checkpoint(layer, torch.ones(4, 3), use_reentrant=False, preserve_rng_state=False)
    out.sum().backward()
    return layer.weight.grad.sum().item()
"""


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", RECOMPUTED + program], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_recomputation_does_not_import_the_compiler_and_leaves_nothing_behind() -> None:
    program = """
with without_compiler():
    print(step(), "torch._dynamo" in sys.modules)
print("_dynamo" in vars(torch), hasattr(checkpoint.__wrapped__, "__dynamo_disable"))
print(torch._dynamo.config is sys.modules["torch._dynamo.config"], step())
"""
    # Six gradients of 4 samples of ones; without the context a second step adds as much.
    assert run(program) == ["24.0", "False", "False", "False", "True", "48.0"]


def test_whatever_else_is_asked_of_the_compiler_is_its_own() -> None:
    program = """
with without_compiler():
    asked = torch._dynamo.is_compiling
    print(asked is sys.modules["torch._dynamo"].is_compiling, torch._dynamo.config.cache_size_limit)
    before = step()
    import torch._dynamo
    print(torch._dynamo is sys.modules["torch._dynamo"])
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config.cache_size_limit, before)
"""
    asked, limit, imported, after, same_limit, gradient = run(program)
    assert (asked, imported, after, gradient) == ("True", "True", "True", "24.0")
    assert limit == same_limit


def test_a_compiler_that_is_there_is_used() -> None:
    program = """
import torch._dynamo
real = torch._dynamo
with without_compiler():
    print(torch._dynamo is real, step(), hasattr(checkpoint.__wrapped__, "__dynamo_disable"))
"""
    assert run(program) == ["True", "24.0", "True"]
