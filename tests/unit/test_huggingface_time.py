"""A published configuration is planned in seconds, and only `osdp` has its say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thoroughness import some

from osdp.planning.request import MATERIAL_GAIN

pytest.importorskip("transformers", reason="needs transformers (the extra `hf`)")

CHECKOUT = Path(__file__).resolve().parents[2]
MOST_IMPORTS = 2.5
"""From process start to the plan, in the CPU seconds of importing torch and transformers, which are a part of it.

Machines, and hours of one machine, differ by half in how much they compute in a second; with 2.4 s for the imports it
is 6.0 s."""
ATTEMPTS = 5
"""Other work on the same cores only ever adds to the seconds that the kernel counts."""
PUBLISHED = json.loads((CHECKOUT / "scripts" / "bench" / "huggingface_models.json").read_text())
SIMPLE_GAP = 1 - 1 / (1 + MATERIAL_GAIN)
"""Of a simple plan, which is taken where no other gains more."""
GAPS = {"Llama-3-8B": SIMPLE_GAP, "Mixtral-8x7B": 0.07, "Qwen3-8B": SIMPLE_GAP, "Gemma-2-2B": SIMPLE_GAP}
"""No uniform plan of Mixtral fits, and a default search leaves more open (`FEWER_MADE`)."""


def cpu_s_of(*arguments: str) -> tuple[float, str, str]:
    """Run Python and return its CPU seconds, and what it wrote to stdout and to stderr."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, err
    return usage.ru_utime + usage.ru_stime, out, err


def planned(path: Path) -> tuple[float, float, dict[str, float], str]:
    """Return the CPU seconds of the imports and of the program, the plan's report, and what went to stderr."""
    imports_s, *_ = cpu_s_of("-c", "import torch, transformers")
    task = ("--model", f"hf:{path}", "--cluster", "h100-4x8", "--precision", "bf16")
    cpu_s, out, err = cpu_s_of("-m", "osdp", "plan", *task, "--json")
    return imports_s, cpu_s, json.loads(out), err


@pytest.mark.parametrize("name", some([*GAPS], 4))
def test_a_model_is_planned_in_few_cpu_seconds(name: str, tmp_path: Path) -> None:
    path, ratios = tmp_path / "config.json", list[float]()
    path.write_text(json.dumps(PUBLISHED[name]))
    while not ratios or (min(ratios) > MOST_IMPORTS and len(ratios) < ATTEMPTS):
        imports_s, cpu_s, report, err = planned(path)
        ratios.append(cpu_s / imports_s)
        assert err == ""
        assert report["gap"] <= GAPS[name]
        print(f"\n{name} on 4 x 8 H100: {cpu_s:.1f} s CPU from process start, imports alone {imports_s:.1f} s")
    assert min(ratios) <= MOST_IMPORTS
