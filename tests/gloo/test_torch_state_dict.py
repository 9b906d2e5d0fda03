"""PyTorch's own functions for full state dicts, on models that OSDP has sharded."""

from __future__ import annotations

from functools import partial

import torch
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from toys import Blocks, plan_of, seeded

build = partial(Blocks, frozen=False)


def get_and_set(rank: int) -> None:
    """Get whole tensors, on the CPU of rank 0 or everywhere; set them in a model of other values."""
    from osdp import OSDP

    wanted = dict(seeded(build).state_dict())
    for strategy, choices in (("shard", {}), ("owner", {}), ("shard", {"blocks.0.up": "split(shard, replicate)"})):
        plan = plan_of(build(), strategy, choices, ranks=(1, 2))
        model, other = OSDP(seeded(build), plan), OSDP(seeded(build, seed=9), plan)
        offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert offloaded.keys() == (set() if rank else wanted.keys())
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for got in (offloaded, full):
            assert all(torch.equal(got[name], wanted[name]) for name in got), strategy
        assert full.keys() == wanted.keys()
        set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
        got = other.full_state_dict(rank0_only=False)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), strategy
        sent = {} if rank else {name: -value for name, value in wanted.items()}
        set_model_state_dict(other, sent, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        got = other.full_state_dict(rank0_only=False)
        assert all(torch.equal(got[name], -wanted[name]) for name in wanted), strategy


def test_full_state_dicts_by_torch() -> None:
    run_ranks(get_and_set, 2, timeout_s=40)
