"""Where users import OSDP from stays, wherever the code is."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("osdp", "OSDP"),
        ("osdp.planning", "plan_model Request memory_limit read_plan write_plan reopen"),
        ("osdp.zoo", "load_model load_cluster"),
        ("osdp.fairscale", "FSDP auto_wrap default_auto_wrap_policy enable_wrap gen_fsdp_args"),
        ("osdp.partition", "zero3_partition_tensors owner_pins"),
        ("osdp.odc", "init"),
        ("osdp.odc.fsdp.fsdp1", "patch_fsdp1 pre_minibatch_start pre_optimizer_step stop"),
        ("osdp.odc.fsdp.fsdp2", "patch_lazy_init pre_minibatch_start pre_optimizer_step stop"),
        ("osdp.tracing", "Tracer MEMORY_STEP TRACE_STEP"),
    ],
)
def test_public_paths_stay(module: str, names: str) -> None:
    found = import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_methods_that_have_new_names_keep_the_old() -> None:
    model = import_module("osdp").OSDP
    assert model.settle_gradients is model.finish_gradients
