"""All checks, in the order in which they run."""

from __future__ import annotations

from validation import (
    allocator,
    kernels,
    lost_rank,
    machine,
    memory,
    one_sided,
    profile_and_step,
    ranks,
    several_gpus,
    within_a_limit,
)
from validation.check import Check

GATHERED = "gathers reach 95 % of `copy_` (90 % up to 4 MB), pushes 90 % of `add_`, pack and take 90 % of a copy's rate"

CHECKS = (
    Check(1, "versions, driver, L2 cache, P2P and NVLink matrix", "recorded", machine.record, 60.0, times_nothing=True),
    Check(
        2,
        "CuPy compiles every kernel, once",
        "compiled kernels are unchanged",
        one_sided.compile_kernels,
        150.0,
        times_nothing=True,
    ),
    Check(
        3, "kernels against PyTorch", "same bits; adds exact on whole numbers", kernels.check, 180.0, times_nothing=True
    ),
    Check(4, "bandwidth, buffers larger than L2", GATHERED, one_sided.bandwidth, 260.0),
    Check(
        5,
        "streams that lag behind",
        "exact, and wrong where barriers do not join them",
        one_sided.streams,
        220.0,
        times_nothing=True,
    ),
    Check(6, "windows among processes", "lost ranks named", one_sided.processes, 420.0, times_nothing=True),
    Check(
        7,
        "models train through windows",
        "losses and weights as in one process",
        one_sided.models,
        320.0,
        times_nothing=True,
    ),
    Check(
        8,
        "memory of one rank of 8 and of 2 x 4, every strategy",
        "allocated within -1 to +3 %, reserved within the limit and 18 MiB, no more retries than planned for",
        memory.check,
        300.0,
        times_nothing=True,
    ),
    Check(
        9,
        "gpt2-1.5b as rank 0 of 8 within 8 GB",
        "no out-of-memory, step within 15 % of what is predicted without a network",
        within_a_limit.of_eight,
        120.0,
    ),
    Check(
        10,
        "allocate to failure under a limit, and windows that are closed",
        "reserved within 2 % of it, at most 64 MiB left",
        allocator.check,
        180.0,
    ),
    Check(
        11,
        "NCCL at world size 1: DDP, FSDP2 with offload, osdp verify",
        "exit 0; context and communicator recorded",
        ranks.one_rank,
        180.0,
    ),
    Check(
        12,
        "osdp profile, and a step of gpt2-medium in bf16",
        "predicted within 10 % of measured",
        profile_and_step.check,
        200.0,
    ),
    Check(
        13,
        "osdp train gpt2-1.5b in 8 GB of one GPU, 5 steps",
        "finite loss, peak within the limit",
        within_a_limit.alone,
        240.0,
        times_nothing=True,
    ),
    Check(14, "compute-sanitizer: memcheck, initcheck", "no errors", one_sided.sanitize, 420.0, times_nothing=True),
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
    Check(20, "a rank that is killed", "the other names it", lost_rank.check, 180.0, gpus=2),
)
