"""The benchmark of the kernels: its contestants do what they say, and it says why it cannot run."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import programs
import pytest
import torch
from host_device import HostDevice, build_kernels

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import odc_gpu  # noqa: E402


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    """Return a device whose kernels are compiled once: that takes most of a test."""
    return HostDevice(build_kernels(tmp_path_factory.mktemp("kernels")), "unused")


def test_contestants_do_the_same(device: HostDevice) -> None:
    one, other = (odc_gpu.Buffers.make(3, 1000, device.torch_device) for _ in range(2))
    run = odc_gpu.contestants(device, [one, other])
    for name in ("gather", "copies"):
        one.full.zero_()
        run[name](0)
        assert torch.equal(one.full, one.windows)
    for name in ("push", "adds", "add"):
        before, gradient = one.windows.clone(), other.full.clone()
        one.full.copy_(gradient)
        run[name](0)
        assert torch.equal(one.windows, before + gradient)
    run["copy"](0)
    assert torch.equal(one.full, one.windows)
    other.windows.zero_()
    run["pack"](1)
    assert torch.equal(other.windows, other.full)
    run["cast"](1)
    assert torch.equal(other.windows.view(torch.bfloat16).view(-1)[:3000], other.full.bfloat16().view(-1))
    before = one.windows.clone()
    run["take"](0)
    assert torch.equal(one.full, before)
    assert not one.windows.any()


def test_rates_and_shares(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers take 2 s, additions 1.5 s, all else 1 s: a push moves as many bytes as an addition, not as a copy."""
    took_s = {"gather": 2.0, "push": 2.0, "add": 1.5}
    monkeypatch.setattr(odc_gpu, "seconds_of", lambda run, *_: took_s.get(run.__name__, 1.0))
    found = {one.contestant: one for one in odc_gpu.measure(device, 2, 4000, 5, 1)}
    assert found["gather"].share == (0.5, 0.5, 0.5)
    assert found["gather"].gb_per_s == pytest.approx(2 * 4000 / 2.0 / 1e9)
    assert found["push"].share == (0.75, 0.75, 0.75)
    assert found["adds"].share == (1.5, 1.5, 1.5)
    assert found["pack"].share == (1.0, 1.0, 1.0)
    assert found["cast"].share == (0.75, 0.75, 0.75)  # of each element 6 bytes, where a copy moves 8
    assert found["take"].share == (1.5, 1.5, 1.5)  # 12


@pytest.mark.skipif(torch.cuda.is_available() and find_spec("cupy") is not None, reason="there is a GPU")
def test_it_says_what_is_missing() -> None:
    done = subprocess.run([programs.python(), SCRIPTS / "odc_gpu.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "CuPy cannot be loaded" in done.stderr or "PyTorch finds no GPU" in done.stderr
    assert "Traceback" not in done.stderr
