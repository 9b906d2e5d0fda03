"""scripts/script_gpt2_training.sh and script_bert_training.sh: which configuration they take, and options."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from checkouts import stub_checkout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose environment counts as installed, and whose `osdp` says what it was called with."""
    return stub_checkout(tmp_path)


def run(root: Path, model: str, nvidia_smi: str, *arguments: str) -> list[str]:
    """Run the script of a model where nvidia-smi prints something, and return what `osdp` was called with."""
    tools = root / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (tools / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    script = root / "scripts" / f"script_{model}_training.sh"
    done = subprocess.run(["sh", str(script), *arguments], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("model", "nvidia_smi", "config"),
    [
        ("gpt2", "echo 'GPU 0: NVIDIA TITAN RTX (UUID: x)'", "gpt2-1.5b"),
        ("gpt2", "echo 'No devices found.'", "gpt2"),
        ("gpt2", "exit 9", "gpt2"),
        ("bert", "echo 'GPU 0: NVIDIA TITAN RTX (UUID: x)'", "bert-large"),
        ("bert", "exit 9", "bert"),
    ],
)
def test_the_machine_decides_the_configuration(root: Path, model: str, nvidia_smi: str, config: str) -> None:
    called = run(root, model, nvidia_smi, "--fsdp_type", "FSDP", "--data", "a file.txt")
    assert called == ["train", f"{root}/configs/train/{config}.yaml", "--fsdp_type", "FSDP", "--data", "a file.txt"]
