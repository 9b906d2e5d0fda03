"""On-demand communication under FSDP2: the calls of the library ODC, on `torch.distributed.fsdp.fully_shard`.

Nothing of PyTorch is patched: each unit gets a custom all-gather that pulls and a custom reduce-scatter that
pushes, by FSDP2's own interface for that.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard

from osdp.odc.fsdp.session import Session, Wrapped, check_neighbours, finish, session_of, stop
from osdp.odc.options import options
from profiler.errors import OsdpError
from runtime.odc.one_sided_unit import OneSidedUnit
from runtime.torch_compat import communication_of, compute_dtypes, has_secondary_mesh, packed_parameters

__all__ = ["patch_fsdp2", "patch_lazy_init", "pre_minibatch_start", "pre_optimizer_step", "stop"]

PLACEMENTS = ((Shard(0),), (Replicate(), Shard(0)))
"""Of parameters over one mesh dimension, and over two (HSDP)."""

_patched: WeakSet[nn.Module] = WeakSet()


def patch_fsdp2() -> None:
    """Check that this PyTorch has what is needed. May be left out: `fully_shard` stays as it is.

    Raises OsdpError if FSDP2 has no custom communication.
    """
    if not hasattr(FSDPModule, "set_custom_all_gather") or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise OsdpError("this PyTorch has no custom communication in FSDP2", expected="torch 2.11 to 2.13")


def patch_lazy_init(module: nn.Module) -> None:
    """Say that a module which `fully_shard` has wrapped, and all such modules in it, will pull and push.

    To be called for each of them or once for the root.  Raises OsdpError if there is none.
    """
    wrapped = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not wrapped:
        what = "patch_lazy_init of a module that is not wrapped"
        expected = "a module, or one with parts, that fully_shard was called on"
        raise OsdpError(what, got=type(module).__name__, expected=expected, advice="call fully_shard first")
    _patched.update(wrapped)


def pre_minibatch_start(model: nn.Module) -> None:
    """Publish the parameters of a model, and give up gradients that no step has used. A collective call.

    Once before the first forward is enough, once per step does no harm; it is needed again when parameters were
    changed by other means than an optimizer, or when a step was left out.  The first call opens the windows.

    Raises:
        OsdpError: before `odc.init`, or if the model is not wrapped, not patched, or wrapped in a way that
            on-demand communication cannot serve.
        PeerLost: if ranks do not come; it names them.
    """
    session = session_of(model) or Session(_wrapped(model), options())
    session.start()


def pre_optimizer_step(model: nn.Module, micro_batches: int | None = None) -> None:
    """Complete this step's gradients from what all ranks have pushed, before clipping and the optimizer step.

    A collective call, also for a rank that had no micro-batch.

    Args:
        model: as given to `pre_minibatch_start`, or a part of it.
        micro_batches: how many this rank did, with `odc.init(accumulation=M)`; by default they are counted.

    Raises:
        OsdpError: before `pre_minibatch_start`.
        PeerLost: if ranks do not come; it names them.
    """
    finish("fsdp2", model, micro_batches)


def _wrapped(model: nn.Module) -> Wrapped:
    wrapped = ((name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule))
    modules = {name: part for name, part in wrapped if packed_parameters(part)}
    _check(modules)
    first = next(packed_parameters(part)[0].sharded_param for part in modules.values())
    mesh = first.device_mesh
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    check_neighbours(ranks, mesh.size())
    units = [OneSidedUnit(name or "root", part, compute_dtypes(part)[0]) for name, part in modules.items()]
    own = {name: communication_of(part) for name, part in modules.items()}

    def reshard() -> None:
        for part in modules.values():
            part.reshard()

    def restore() -> None:
        for unit in units:
            unit.release()
        for name, part in modules.items():
            if (communication := own[name]) is not None:
                part.set_custom_all_gather(communication[0])
                part.set_custom_reduce_scatter(communication[1])
            part.set_requires_all_reduce(True, recurse=False)

    for part in modules.values():
        part.set_requires_all_reduce(mesh.ndim == 1, recurse=False)  # across replicas it is done once per step
    return Wrapped("fsdp2", model, units, first.device, len(ranks), reshard, restore, partial(_check_found, units))


def _check(modules: Mapping[str, FSDPModule]) -> None:
    """Raise OsdpError for what on-demand communication cannot serve."""
    if not modules:
        raise OsdpError("this model is not wrapped", expected="fully_shard(...) on its layers and on itself")
    for name, part in modules.items():
        module = cast(nn.Module, part)
        where = f"{name or 'the root'}, {type(part).__name__}"
        if module not in _patched:
            expected = "patch_lazy_init(module) after fully_shard, or once for the root"
            raise OsdpError("a module was wrapped, but not patched", got=where, expected=expected)
        if session_of(module) is not None:
            what = "a part of this model was started as a model of its own"
            raise OsdpError(what, got=where, advice="call pre_minibatch_start with the root only")
        parameters = [one.sharded_param for one in packed_parameters(part)]
        ways = {(parameter.device_mesh.shape, parameter.placements) for parameter in parameters}
        if len(compute_dtypes(part)) > 1 or len(ways) > 1 or next(iter(ways))[1] not in PLACEMENTS:
            what = "on-demand communication needs parameters cut along their first dimension, over one mesh"
            got = f"{where}: {', '.join(str(way) for _, way in sorted(ways, key=str))}"
            raise OsdpError(what, got=got, expected="Shard(0), or Replicate() and Shard(0)")
        if any(parameter.device.type != parameter.device_mesh.device_type for parameter in parameters):
            what = "on-demand communication cannot be combined with offload"
            raise OsdpError(what, got=where, expected="no CPUOffloadPolicy")
        if has_secondary_mesh(part):
            what = "on-demand communication cannot gather over a second mesh"
            raise OsdpError(what, got=where, expected="reshard_after_forward=True or False")
    shapes = {packed_parameters(part)[0].sharded_param.device_mesh.shape for part in modules.values()}
    if len(shapes) > 1:
        raise OsdpError("all modules of a model must have the same mesh", got=", ".join(map(str, sorted(shapes))))


def _check_found(units: Sequence[OneSidedUnit]) -> None:
    """Raise OsdpError for gradients of some of a unit's parameters on a mesh that hides which these are."""
    unclear = [unit.name for unit in units if unit.is_unclear]
    if unclear:
        what = "some parameters of a unit had no gradient, and a mesh with replicas hides which"
        advice = "wrap what is not always used by itself, or use a mesh of one dimension"
        raise OsdpError(what, got=", ".join(unclear[:5]), expected="gradients of all its parameters", advice=advice)
