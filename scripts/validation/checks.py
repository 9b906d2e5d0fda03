"""All checks, in the order in which they run."""

from __future__ import annotations

from validation import allocator, machine, memory, profile_and_step, ranks, several_gpus, within_a_limit
from validation.check import Check

CHECKS = (
    Check(1, "versions, driver, L2 cache, P2P and NVLink matrix", "recorded", machine.record, 60.0),
    Check(
        8,
        "memory of one rank of 8 and of 2 x 4, every strategy",
        "allocated within -1 to +3 %, reserved within the limit, no allocation retry",
        memory.check,
        150.0,
    ),
    Check(
        9,
        "gpt2-1.5b as rank 0 of 8 within 8 GB",
        "no out-of-memory, step within 15 % of predicted computation",
        within_a_limit.of_eight,
        120.0,
    ),
    Check(10, "allocate to failure under a limit", "reserved within 2 % of it", allocator.fill, 60.0),
    Check(
        11,
        "NCCL at world size 1: DDP, FSDP2 with offload, osdp verify",
        "exit 0; context and communicator recorded",
        ranks.one_rank,
        120.0,
    ),
    Check(
        12,
        "osdp profile, and a step of gpt2-medium in bf16",
        "predicted within 10 % of measured",
        profile_and_step.check,
        150.0,
    ),
    Check(
        13,
        "osdp train gpt2-1.5b in 8 GB of one GPU, 5 steps",
        "finite loss, peak within the limit",
        within_a_limit.alone,
        180.0,
    ),
    Check(
        15,
        "pulls from another GPU, and matrix products beside them",
        "pulls >= 85 % of copies, products at most 10 % slower",
        several_gpus.pulls,
        gpus=2,
    ),
    Check(16, "strategies and osdp verify under NCCL", "the same losses, exit 0", ranks.several_ranks, 300.0, gpus=2),
    Check(17, "steps of three plans under NCCL", "within 15 % of prediction", several_gpus.plans, 600.0, gpus=2),
    Check(
        18,
        "ODC against FSDP on uneven lengths",
        "the same losses; times recorded",
        several_gpus.uneven_lengths,
        180.0,
        gpus=2,
    ),
    Check(19, "fairscale's FSDP beside ours", "the same losses; times recorded", several_gpus.fairscale, 180.0, gpus=2),
)
