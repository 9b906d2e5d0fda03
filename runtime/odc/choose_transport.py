"""Which transport a group of ranks gets, and why it may get none.

    ranks on the CPU       shared memory                      of one machine
    ranks on GPUs          CUDA IPC and the kernels of cuda/  of one machine; GPUs that reach each other
    a dry run              tensors that nobody shares

Containers, MIG and drivers can forbid CUDA IPC.  So what can be queried is queried, and
then a small window is made, published, pulled from and pushed into, before a model depends on it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from profiler.errors import OsdpError, first_line
from runtime.failures.peer_faults import PeerLost
from runtime.failures.rank_agreement import Agreement
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.dry_run_windows import DryRunTransport, is_dry_run
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.shared_memory import SharedMemoryTransport, can_share
from runtime.odc.windows import Transport, WindowSpec

TRIAL_NUMEL = 1000
"""Elements of a shard that is tried out."""
TRIAL_PUSHES = 20
"""Of whole numbers up to 127, whose sum over thousands of ranks is exact in fp32."""
TRIAL_S = 60.0
"""How long ranks wait for each other in a trial."""
LOST = "another rank did not take part"
"""Reason that says less than the other rank's."""


def open_transport(
    group: dist.ProcessGroup, specs: Sequence[WindowSpec], device_type: str, timeout_s: float, ordered: bool = False
) -> Transport:
    """Open windows over a group, for tensors on "cpu" or "cuda". Collective.

    Raises OsdpError on every rank if windows cannot be had (`why_none`).
    """
    if is_dry_run():
        return DryRunTransport(group, specs, timeout_s, ordered)
    if device_type == "cpu":
        return SharedMemoryTransport(group, specs, timeout_s, ordered)
    device = Agreement(group, dist.get_rank(), group.size()).together("find its GPU", CupyDevice)
    return DeviceTransport(group, specs, device, timeout_s, ordered)


def why_none(group: dist.ProcessGroup, device_type: str, ordered: bool = False) -> str:
    """Return why ranks of a group cannot have windows, the same on all of them; empty if they can. Collective."""
    if is_dry_run():
        return ""
    reason = can_share(group)
    return reason if reason or device_type == "cpu" else why_no_windows(group, CupyDevice, ordered)


def why_none_anywhere(groups: Sequence[tuple[dist.ProcessGroup, bool]], device_type: str) -> str:
    """Return why this rank's groups or those of other ranks cannot have windows; empty if all can.

    Groups come with whether their windows are ordered.  A collective call of all ranks, with the same answer on all.
    """

    def look() -> str:
        return next(filter(None, [why_none(group, device_type, ordered) for group, ordered in groups]), "")

    return next(filter(None, Agreement.all().gather("look for windows", look)), "")


def why_no_windows(group: dist.ProcessGroup, find: Callable[[], CupyDevice], ordered: bool = False) -> str:
    """Return why GPUs of one machine cannot have windows, the same on all ranks; empty if they can. Collective.

    `find` returns this rank's GPU or raises OsdpError.
    """
    agreement = Agreement(group, dist.get_rank(), group.size())
    ranks = dist.get_process_group_ranks(group)
    found: list[CupyDevice] = []

    def agreed(doing: str, reason: Callable[[], str]) -> str:
        reasons = zip(ranks, agreement.gather(doing, reason), strict=True)
        given = [(why == LOST, f"rank {rank}: {why}") for rank, why in reasons if why]
        return min(given)[1] if given else ""

    def look() -> str:
        try:
            found.append(find())
        except OsdpError as error:
            return _in_a_line(error)
        return ""

    if reason := agreed("look for its GPU", look):
        return reason
    device = found[0]
    others = agreement.gather("name its GPU", lambda: device.identity)
    obstacles = (device.obstacle(other, needs_atomics=not ordered) for other in others)
    if reason := agreed("look at the other GPUs", lambda: next(filter(None, obstacles), "")):
        return reason
    return agreed("try windows", partial(_trial, group, device, ordered))


def _trial(group: dist.ProcessGroup, device: CupyDevice, ordered: bool) -> str:
    """Publish, pull, push and take; return what went wrong. Collective.

    All push at once and often, so that adds get lost where a link that could not be asked has no atomics.
    """
    specs = [WindowSpec("trial", TRIAL_NUMEL, torch.bfloat16)]
    numbers = torch.arange(TRIAL_NUMEL * group.size(), device=device.torch_device).float() % 128
    try:
        with DeviceTransport(group, specs, device, TRIAL_S, ordered) as transport:
            (window,) = transport.windows
            own = numbers.view(group.size(), -1)[group.rank()]
            window.publish(own)
            transport.barrier()
            pulled = torch.empty(numbers.numel(), dtype=torch.bfloat16, device=device.torch_device)
            window.pull(pulled)
            for _ in range(TRIAL_PUSHES):
                window.push(numbers)
            transport.barrier()
            taken = window.take_gradient()
            if torch.equal(pulled, numbers.bfloat16()) and torch.equal(taken, TRIAL_PUSHES * group.size() * own):
                return ""
            return "a trial window returned other values than were sent"
    except PeerLost:
        return LOST
    except Exception as error:
        return f"windows cannot be made: {_in_a_line(error)}"


def _in_a_line(error: Exception) -> str:
    if isinstance(error, OsdpError):
        return f"{error.what} ({error.got})" if error.got else error.what
    return first_line(error)
