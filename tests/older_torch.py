"""What does not work before torch 2.13, and why: those tests are skipped there, by `scripts/test.sh --torch 2.11`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch.distributed.fsdp import FSDPModule

PENDING = (
    "operations on lists of DTensors do not ask their subclasses before torch 2.13: pending gradients are not refused"
)
CHECKPOINT = "before torch 2.13 torch.utils.checkpoint takes no packed sequences"
NOT_REPLAYED = "before torch 2.13 blocks that checkpoint parts of themselves are traced one by one, to the same graph"
ONE_LENGTH = "before torch 2.13 an LSTM of packed samples of one length holds less on a CPU than is predicted"
SKIPPED = {
    "test_changed_by_loops.py::test_gradients_may_be_changed_once_they_are_complete[clip_values]": PENDING,
    "test_changed_by_loops.py::test_gradients_may_be_changed_once_they_are_complete[scale_together]": PENDING,
    "test_changed_by_loops.py::test_gradients_may_be_changed_once_they_are_complete[decay]": PENDING,
    "test_export_fsdp2.py::test_exported_drawn_models": "torch 2.11's fully_shard takes no parametrized modules",
    "test_export_memory.py::test_peak_is_that_of_the_runtime[5]": (
        "before torch 2.13 FSDP2 holds inputs of reductions for longer, which the runtime frees and exports do not"
    ),
    "test_optimizers_of_others.py::test_each_operation_on_lists": "before torch 2.13 there are fewer",
    "test_replay.py::test_what_is_alike_is_replayed_in_every_pass[own checkpoints]": NOT_REPLAYED,
    "test_torch_optimizers.py::test_rows_from_before": "before torch 2.13 parts keep what they were copied from",
    "test_packed_sequences.py::test_a_dry_run_holds_what_is_predicted[blocks]": CHECKPOINT,
    "test_packed_sequences.py::test_a_dry_run_holds_what_is_predicted[classifier]": ONE_LENGTH,
    "test_packed_sequences.py::test_a_dry_run_holds_what_is_predicted[packed inputs]": CHECKPOINT,
    "test_packed_sequences.py::test_a_dry_run_holds_what_is_predicted[tagger]": ONE_LENGTH,
    "test_packed_training.py": CHECKPOINT,
    "test_refused_shapes.py::test_what_kernels_refuse_is_refused[indices that are no integers]": (
        "without data PyTorch takes them before torch 2.13"
    ),
}
"""Reasons, by how the names of tests begin."""


def skip(items: Iterable[pytest.Item]) -> None:
    """Skip them where torch is older."""
    if hasattr(FSDPModule, "reset_iter_state"):
        return
    for item in items:
        name = item.nodeid.rpartition("/")[2]
        for begin, reason in SKIPPED.items():
            if name.startswith(begin):
                item.add_marker(pytest.mark.skip(reason=reason))
