"""What holds for all models that use on-demand communication: set once, by `init`."""

import math
from dataclasses import dataclass
from functools import partial

from profiler.errors import OsdpError
from runtime.failures.rank_agreement import agree
from runtime.meshes import check_process_group


@dataclass(frozen=True)
class Options:
    """The options of `init`."""

    ordered: bool
    timeout_s: float | None
    accumulation: int | None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            what = "timeout_s must be positive"
            raise OsdpError(what, got=f"{self.timeout_s} s", advice="leave it out for the process group's timeout")
        if self.accumulation is not None and self.accumulation < 1:
            expected = "the number of micro-batches that losses are divided by"
            raise OsdpError("accumulation must be at least 1", got=str(self.accumulation), expected=expected)


_options: Options | None = None


def init(*, ordered: bool = False, timeout_s: float | None = None, accumulation: int | None = None) -> None:
    """Prepare on-demand communication. A collective call, after `init_process_group`.

    Args:
        ordered: whether gradients are summed up in the order of ranks: the same bits in every run, for one
            accumulator per rank in place of one.
        timeout_s: after how long a rank that does not reach a barrier counts as lost; by default the process group's.
        accumulation: M, if losses are divided by M, however many micro-batches a rank does in a step.  With S the
            sum of what all ranks pushed, the gradient is then the mean over all their micro-batches, S M / C where
            C is how many these were.  By default it is S / N on N ranks, as FSDP gives it.

    Raises:
        OsdpError: without a process group; if ranks give different options; if other options are in force,
            before `stop`.
    """
    global _options
    check_process_group("odc.init()")
    given = "what odc.init() was given"
    make = partial(Options, ordered, timeout_s, accumulation)
    options = agree(given, f"check {given}", make, advice="the same options on every rank")
    if _options not in (None, options):
        what = "odc.init() was called before with other options"
        raise OsdpError(what, got=str(options), expected=str(_options), advice="call stop() first")
    _options = options


init_nvshmem = init
"""The name that the library ODC has for it; no NVSHMEM is needed."""


def options() -> Options:
    """Return the options in force. Raises OsdpError before `init` and after `stop`."""
    if _options is None:
        what = "on-demand communication was not prepared"
        expected = "odc.init() before, on every rank"
        raise OsdpError(what, expected=expected, advice="call it after init_process_group, and again after stop()")
    return _options


def forget() -> None:
    """Let `init` be called anew."""
    global _options
    _options = None
