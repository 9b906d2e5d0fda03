"""The cluster of the GPUs of this machine, as torch and NVML describe them."""

from __future__ import annotations

import pytest
import torch

from osdp.planning.clusters import default_cluster, load_cluster
from profiler.cluster.visible_gpus import visible_gpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (torch.cuda.is_available() is False)")


def test_the_visible_gpus_make_a_cluster() -> None:
    cluster, gpus = load_cluster("visible"), visible_gpus()[0]
    assert cluster.gpus_per_node == torch.cuda.device_count()
    assert cluster.device.memory_bytes.value == min(gpu.memory_bytes for gpu in gpus)
    assert cluster.device.name in default_cluster()[1] or len({gpu.name for gpu in gpus}) > 1


def test_torch_tells_the_clocks() -> None:
    for gpu in visible_gpus()[0]:
        assert gpu.clock_hz is not None
        assert 0.8e9 < gpu.clock_hz < 4e9
        assert gpu.memory_clock_hz is not None
        assert gpu.memory_bus_bits is not None
        assert 50e9 < 2 * gpu.memory_clock_hz * gpu.memory_bus_bits / 8 < 20e12
