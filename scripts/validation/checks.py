"""All checks, in the order in which they run."""

from __future__ import annotations

from validation import kernels, machine, one_sided
from validation.check import Check

GATHERED = "gathers reach 95 % of `copy_` (90 % up to 4 MB), pushes 90 % of `add_`, pack and take 90 % of a copy's rate"

CHECKS = (
    Check(1, "versions, driver, L2 cache, P2P and NVLink matrix", "recorded", machine.record, 60.0),
    Check(2, "CuPy compiles every kernel, once", "compiled kernels are unchanged", one_sided.compile_kernels, 150.0),
    Check(3, "kernels against PyTorch", "same bits; adds exact on whole numbers", kernels.check, 120.0),
    Check(4, "bandwidth, buffers larger than L2", GATHERED, one_sided.bandwidth, 260.0),
    Check(5, "streams that lag behind", "exact, and wrong where barriers do not join them", one_sided.streams, 220.0),
    Check(6, "windows among processes", "lost ranks named, at most 64 MiB left", one_sided.processes, 420.0),
    Check(7, "models train through windows", "losses and weights as in one process", one_sided.models, 320.0),
    Check(14, "compute-sanitizer: memcheck, initcheck", "no errors", one_sided.sanitize, 420.0),
)
