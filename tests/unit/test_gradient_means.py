"""Means of gradients over ranks: dtypes, shapes and memory; the backend adds nothing, a sum is what one rank has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.gradient_means import means_over_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_means_have_place_dtype_and_shape_and_share_no_memory(four_ranks: None) -> None:
    gradients = [torch.full((2, 1 + place % 3), 4 * place).to(DTYPES[place % 5]) for place in range(12)]
    found = dict(means_over_ranks([*gradients, torch.zeros(0), torch.tensor(6.0)], torch.device("cpu")))
    means = [found[place] for place in range(14)]
    assert [mean.dtype for mean in means] == [*(one.dtype for one in gradients), torch.float32, torch.float32]
    assert [mean.flatten().tolist() for mean in means[:12]] == [[place] * 2 * (1 + place % 3) for place in range(12)]
    assert (means[12].shape, means[13].item()) == ((0,), 1.5)
    held = [mean.untyped_storage().data_ptr() for mean in means if mean.numel()]
    assert len({*held, *(one.untyped_storage().data_ptr() for one in gradients)}) == 13 + 12
    assert all(mean.untyped_storage().nbytes() == mean.nbytes for mean in means)


def test_what_the_host_holds_is_added_up_on_the_device(four_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes nothing of the host's, where offloaded parameters rest and get gradients."""
    devices = []
    monkeypatch.setattr(dist, "all_reduce", lambda total: devices.append(total.device.type))
    ((_, mean),) = means_over_ranks([torch.ones(3)], torch.device("meta"))
    assert devices == [mean.device.type] == ["meta"]
