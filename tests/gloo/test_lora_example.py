"""examples/train_lora.py: adapters of peft on a decoder of transformers in bf16."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks
from thoroughness import THOROUGH

from osdp.models.user_factory import source_of
from osdp.planning.clusters import load_cluster
from osdp.planning.request import Request, plan_graph
from profiler.trace.trace import trace_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lora.py"
STEPS, TIGHT, EVERY = (40, 40, 10) if THOROUGH else (10, 5, 5)
"""Steps; those that are made again, and lose the same, where less memory is; and how often losses are printed."""
LESS = "257MB" if THOROUGH else "255.5MB"
"""Memory in which the backbone is not whole."""
SMALLER = {"step % 10 ": f"step % {EVERY} ", '"num_hidden_layers": 4': '"num_hidden_layers": 2'}
"""What a copy of the script has otherwise, unless thorough: it takes no option for either."""


def example_in(folder: Path) -> Path:
    """Return the script as it stands, or unless thorough a smaller copy in a folder."""
    if THOROUGH:
        return EXAMPLE
    text = EXAMPLE.read_text()
    assert all(text.count(whole) == 1 for whole in SMALLER)
    for whole, part in SMALLER.items():
        text = text.replace(whole, part)
    copied = folder / EXAMPLE.name
    copied.write_text(text)
    return copied


def run_example(rank: int, script: Path, *options: list[str]) -> list[str]:
    """Run the script on a rank with these options, then with those; return what it prints each time.

    Ranks import transformers and peft once, which takes as long as the training, and have one process group.
    """
    told = []
    for given, left_out in zip(options, ("destroy_process_group", "init_process_group"), strict=True):
        printed = io.StringIO()
        arguments = mock.patch.object(sys, "argv", [str(script), *given])
        with arguments, mock.patch.object(dist, left_out), contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
        told.append(printed.getvalue())
    return told


def test_adapters_learn_and_the_backbone_is_whole_where_it_fits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    runs = ["--steps", f"{STEPS}"], ["--mem", LESS, "--steps", f"{TIGHT}"]
    (roomy, tight), silent = run_ranks(run_example, 2, example_in(tmp_path), *runs, joins=False, timeout_s=240)
    assert silent == ["", ""]
    assert re.search(r"frozen: \{'replicate': \d+\}", roomy)
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", roomy)]
    assert losses[-1] < losses[0] - 0.3  # from about ln 256 = 5.55, of what a random decoder can learn
    assert "shard" in tight.splitlines()[0]
    assert re.findall(r"step \d+: loss ([\d.]+)", tight) == [f"{loss:.3f}" for loss in losses[: 1 + TIGHT // EVERY]]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, of a property of its own
def test_the_backbone_is_sharded_in_the_memory_that_the_script_names() -> None:
    """3.0 MiB of backbone and 0.3 of adapters with their states, beside what a CPU rank takes for itself."""
    pytest.importorskip("peft")

    class WrappedError(Exception):
        """Has what the script hands to OSDP."""

    def wrap(*given: Any, **named: Any) -> None:
        raise WrappedError(given, named)

    taken = mock.patch("osdp.OSDP", wrap), mock.patch.object(dist, "init_process_group")
    (named,) = re.findall(r"it is sharded: --mem (\d+)MB", EXAMPLE.read_text())
    with taken[0], taken[1], mock.patch.object(sys, "argv", [str(EXAMPLE)]), pytest.raises(WrappedError) as wrapped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    (model, description, _), others = wrapped.value.args
    graph = trace_model(source_of(model, "lora", None, others["example_inputs"]), micro_batch=4)
    request = Request(int(named) << 20, micro_batch=4, optimizer="adamw")
    assert description == {"optimizer": request.optimizer, "micro_batch": request.micro_batch}
    choices = plan_graph(graph, load_cluster("cpu-gloo", 1, 2), request).plan.choices
    assert "shard" in {choice for name, choice in choices.items() if "lora" not in name}
