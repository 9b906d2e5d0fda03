"""A process with a model of OSDP's waits for gloo's threads when it ends, once."""

from __future__ import annotations

import subprocess

import programs

SCRIPT = """
import time

import torch
import torch.distributed as dist

from osdp import OSDP
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = GPT2Config(29, 8, hidden_size=12, layers=1, heads=2)
models = [OSDP(GPT2(config), device_info="1GB") for _ in range(2)]
time.sleep = lambda seconds: print("waits", seconds)
print("ends")
"""


def test_a_process_waits_once_when_it_ends() -> None:
    done = subprocess.run([programs.python(), "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["ends", "waits 0.05"], done.stderr
