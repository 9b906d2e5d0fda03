"""Models of transformers, peft and torch train on ranks as in one process; `scripts/bench/real_models.py` has all."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_training import GRIDS, KINDS, Row, train_on_ranks
from small_models import MODELS
from thoroughness import THOROUGH

SAMPLE = [
    ("bf16, fp32, fp64, 0-d", "mixture"),
    ("T5ForConditionalGeneration, shallow", "bf16"),  # asks a layer of a block for its dtype
    ("SwinForImageClassification", "recompute"),
]
"""Without experts and adapters, which test_experts.py, test_quantised.py and test_lora_example.py train."""
ROUNDING = 3e-5
"""Of fp32: contrastive losses and cut layers make most of it."""


@pytest.mark.parametrize("ranks", GRIDS if THOROUGH else [2])
def test_real_models_train_as_in_one_process(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    jobs = [(name, kind) for name in MODELS for kind in KINDS] if THOROUGH else SAMPLE
    rows = train_on_ranks(ranks, jobs, tmp_path)
    assert [(row.model, row.kind) for row in rows] == jobs
    assert [row for row in rows if not trained(row)] == []


def trained(row: Row) -> bool:
    """Return whether a model has learnt, and what it does in one process."""
    bound = max(ROUNDING, row.rounding, 2e-4 if "bf16" in row.model else 0.0)  # of a backbone that rests in bf16
    return not row.refused and not row.failed and row.moved > 1e-2 and row.difference <= bound
