"""Which devices `--device` stands for."""

from __future__ import annotations

import pytest
import torch

from osdp.training.devices import chosen_device
from profiler.errors import OsdpError


@pytest.mark.parametrize(
    ("gpus", "ranks", "chosen"), [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda"), (4, 2, "cuda")]
)
def test_auto_is_gpus_where_each_rank_has_one(
    gpus: int, ranks: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert chosen_device("auto", ranks) == chosen
    assert chosen_device("cpu", ranks) == "cpu"
    if chosen == "cuda":
        assert chosen_device("cuda", ranks) == "cuda"
    else:
        with pytest.raises(OsdpError, match="fewer GPUs than ranks" if gpus else "torch sees no GPU"):
            chosen_device("cuda", ranks)
