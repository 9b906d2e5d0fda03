"""Torch without its kernels in Python for the meta device: the same graphs, and what needs the kernels has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profiler.trace import python_kernels

CHECKOUT = Path(__file__).resolve().parents[2]
START = """
import sys
from profiler.trace.python_kernels import import_torch, load_kernels
import_torch()
assert "torch._refs" not in sys.modules
"""


def run(program: str) -> list[str]:
    """Run a program and return the words that it prints."""
    result = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "llama-1b", "uneven"])
def test_a_model_of_the_zoo_is_traced_without_them_and_alike(model: str) -> None:
    traced = f"""
from hashlib import sha256
from osdp.zoo import load_model
from profiler.trace.trace import trace_model
graph = trace_model(load_model("{model}", sequence_length=64))
print(sha256(repr(graph).encode()).hexdigest(), "torch._refs" in sys.modules)
"""
    (without, loaded), (with_them, imported) = run(START + traced), run("import sys, torch" + traced)
    assert without == with_them
    assert (loaded, imported) == ("False", "True")


@pytest.mark.parametrize(
    "program",
    [
        "load_kernels()",
        "import torch._prims",
        "from torch._refs import linalg",
        "import torch._decomp.decompositions",
        "import torch.distributed.tensor",
        "from torch._subclasses.fake_tensor import FakeTensorMode; import torch._dynamo",
    ],
)
def test_they_are_loaded_in_order_by_whatever_needs_them(program: str) -> None:
    shown = f"""
{program}
import torch
import torch._decomp
print(torch.ones(3, device="meta").cumsum(0).shape[0])
print("_meta_registrations.py" in torch._C._dispatch_dump("aten::cumsum"))
print(torch._decomp.__spec__.name, torch._decomp.__spec__.origin is not None)
print(sys.modules["torch._meta_registrations"].__spec__.origin is not None)
"""
    assert run(START + shown) == ["3", "True", "torch._decomp", "True", "True"]


def test_an_op_that_no_rule_covers_loads_them() -> None:
    program = """
import torch
from torch import nn
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).cumsum(1).sum()

graph = trace_model(ModelSource("summed", Summed, lambda module, batch: ((torch.rand(batch, 4),), {}), 1))
print(len(graph.operators), "torch._refs" in sys.modules)
"""
    assert run(START + program) == ["1", "True"]


def test_what_runs_without_them_has_no_kernel_in_python() -> None:
    for name in python_kernels._IN_CPP:
        assert "_meta_registrations.py" not in torch._C._dispatch_dump(name)
    assert "_meta_registrations.py" in torch._C._dispatch_dump("aten::cumsum")


def test_views_have_none_either() -> None:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    ops = [getattr(one, kind) for one in packets if hasattr(one, "overloads") for kind in one.overloads()]
    views = [op for op in ops if op.is_view]
    assert len(views) > 50
    assert [op for op in views if "_meta_registrations.py" in torch._C._dispatch_dump(op.name())] == []
