"""`osdp verify --device cuda`: real steps on one GPU, as `torch.cuda` counts them, against the prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rehearsals import plan_of

from osdp.planning.plan_file import write_plan
from osdp.zoo import load_cluster, load_model
from profiler.trace.trace import trace_model

NEEDED_BYTES = 12 * 2**30
CHECKOUT = Path(__file__).resolve().parents[2]


def missing() -> str:
    """Return why nothing can be measured here; empty if it can."""
    if not torch.cuda.is_available():
        return "no GPU (torch.cuda.is_available() is False)"
    free_bytes, _ = torch.cuda.mem_get_info()
    return "" if free_bytes >= NEEDED_BYTES else f"the GPU has {free_bytes} bytes free of the {NEEDED_BYTES} needed"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize(
    ("precision", "recompute", "micro_batch", "accumulation"),
    [("fp32", False, 2, 1), ("fp32", True, 4, 2), ("bf16", False, 4, 1), ("bf16", True, 4, 2)],
)
def test_a_step_takes_what_was_predicted(
    precision: str, recompute: bool, micro_batch: int, accumulation: int, tmp_path: Path
) -> None:
    machine = load_cluster("h200-1")
    graph = trace_model(load_model("gpt2-medium"), precision, "cuda")
    plan = plan_of(
        graph,
        machine,
        {operator.name: "replicate" for operator in graph.operators},
        [block.name for block in graph.blocks] if recompute else [],
        micro_batch=micro_batch,
        accumulation=accumulation,
    )
    write_plan(tmp_path / "plan.yaml", plan)
    command = [sys.executable, "-m", "osdp", "verify", str(tmp_path / "plan.yaml"), "--device", "cuda", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr
    told = json.loads(done.stdout)
    assert (told["how"], told["world_size"], told["rank"]) == ("cuda", 1, 0)
    allocated, reserved = told["tracked"]["allocated"], told["tracked"]["reserved"]
    assert told["tracked_peak_bytes"] == allocated <= reserved == told["reserved_bytes"]
    predicted = told["predicted_peak_bytes"]
    assert predicted / 1.03 <= allocated <= 1.01 * predicted
    assert done.returncode == (0 if told["holds"] else 1)
