"""OSDP's runtime under fairscale's `enable_wrap` and `auto_wrap`, with groups; for any model.

    from osdp.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args

    fsdp_args = gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type="group_sharding", model_type="bert-large")
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=1e6)
        model = auto_wrap(model, auto_wrap_policy=my_auto_wrap_policy)

`enable_wrap` and `default_auto_wrap_policy` are fairscale's own.  fairscale's `auto_wrap` leaves out
what is left of a model when its large modules are wrapped, and wraps tied weights twice; the one here
chooses by it and then shards the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist
from fairscale.nn.wrap import auto_wrap as wrap_chosen
from fairscale.nn.wrap import default_auto_wrap_policy, enable_wrap, wrap
from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from osdp.compat.seed_groups import grouped_strategy
from osdp.compat.wrapping import Wish, shard_chosen
from planner.strategies.spec import COMPUTE_BYTES, Strategy
from profiler.errors import OsdpError
from runtime.meshes import check_process_group, check_world

__all__ = ["FSDP", "Groups", "auto_wrap", "default_auto_wrap_policy", "enable_wrap", "gen_fsdp_args", "wrap"]


@dataclass(frozen=True)
class Groups:
    """Ranks in groups of a node each, and what is done with them."""

    nodes: int
    ranks_per_node: int
    strategy: Strategy
    """How every module is sharded."""
    model: str
    """What messages call the model."""


def gen_fsdp_args(nnodes: int, nproc_per_node: int, gsdp_type: str, model_type: str = "the model") -> dict[str, Any]:
    """Return the arguments of `FSDP` for `nnodes` nodes of `nproc_per_node` ranks.

    gsdp_type: `group_sharding`, `communication_with_groups` or `none` (see `osdp.compat.seed_groups`).  For `none`
        there are no arguments, so that fairscale's own FSDP takes them too; it knows none of the others.
    model_type: what messages call the model, any text; nothing is looked up by it, as which modules are wrapped
        is for the policy to say.

    Raises OsdpError if the type is not known or the process group, where there is one, has another size.
    """
    for name, value in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise OsdpError(f"{name} is no whole number", got=repr(value), expected="1 or more")
    strategy = grouped_strategy(gsdp_type, nnodes, nproc_per_node)
    if dist.is_initialized():
        check_world(nnodes, nproc_per_node)
    return {} if gsdp_type == "none" else {"groups": Groups(nnodes, nproc_per_node, strategy, str(model_type))}


@dataclass(frozen=True)
class _Mark:
    """A module that is to be wrapped."""

    wish: Wish
    guard: RemovableHandle
    """Refuses its forward."""


_marks: WeakKeyDictionary[nn.Module, _Mark] = WeakKeyDictionary()


class FSDP:
    """Wraps a module: PyTorch's `fully_shard` in place, with groups; what is returned is the module itself.

    Within `enable_wrap` the module is only marked, as its model is not known yet; `auto_wrap` of this module, or
    `FSDP(model, **fsdp_args)` after it, shards the model with all marked modules in it. All ranks get the parameters
    and buffers of rank 0. Names stay those of the model; parameters and gradients are DTensors, which
    `torch.nn.utils.clip_grad_norm_` and `torch.distributed.checkpoint` take.
    """

    def __new__(  # type: ignore[misc]  # fairscale wants a class, and the module stays what it is
        cls, module: nn.Module, groups: Groups | None = None, precision: str = "fp32", **unknown: Any
    ) -> nn.Module:
        """Return `module`. A collective call outside of `enable_wrap`.

        groups: what `gen_fsdp_args` gives; without them everything is sharded over all ranks.
        precision: `fp32`, or `bf16` to compute in it.

        Raises OsdpError for other options, a module that is wrapped already, or no process group.
        """
        wish = _wish(groups, precision, **unknown)
        if not isinstance(module, nn.Module):
            raise OsdpError("FSDP wraps modules", got=type(module).__name__, expected="an nn.Module")
        if isinstance(module, FSDPModule) or module in _marks:
            raise OsdpError("the module is wrapped already", got=type(module).__name__)
        if not ConfigAutoWrap.in_autowrap_context:
            return _shard(module, wish)
        _marks[module] = _Mark(wish, module.register_forward_pre_hook(_refuse))
        return module


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **overrides: Any) -> nn.Module:
    """Wrap what the policy chooses, as fairscale's function of this name does, and shard the model.

    What the policy leaves out is sharded with the model itself. Outside of `enable_wrap` nothing is done, and for other
    classes than `FSDP` what fairscale does. A collective call; raises OsdpError as `FSDP` does.
    """
    wrapped: nn.Module = wrap_chosen(module, auto_wrap_policy=auto_wrap_policy, **overrides)
    if not ConfigAutoWrap.in_autowrap_context or ConfigAutoWrap.wrapper_cls is not FSDP:
        return wrapped
    mark = _marks.get(wrapped)
    return _shard(wrapped, mark.wish if mark else _wish(**(ConfigAutoWrap.kwargs | overrides)))


def _wish(groups: Groups | None = None, precision: str = "fp32", **unknown: Any) -> Wish:
    """Return how a module is to be wrapped; raises OsdpError."""
    if unknown or not isinstance(groups, Groups | None):
        got = ", ".join(f"{name}={value!r}" for name, value in unknown.items()) or f"groups={groups!r}"
        raise OsdpError(
            "FSDP does not take these options",
            got=got,
            expected="groups, as gen_fsdp_args gives them, and precision",
            advice="fairscale's own options have no counterpart here: leave them out",
        )
    if precision not in COMPUTE_BYTES:
        raise OsdpError("FSDP does not know this precision", got=repr(precision), expected=", ".join(COMPUTE_BYTES))
    check_process_group()
    if groups is None:
        return Wish(1, dist.get_world_size(), grouped_strategy("none", 1, dist.get_world_size()), precision)
    check_world(groups.nodes, groups.ranks_per_node)
    return Wish(groups.nodes, groups.ranks_per_node, groups.strategy, precision, groups.model)


def _shard(model: nn.Module, wish: Wish) -> nn.Module:
    """Shard a model with the marked modules in it, each as it was marked and the rest by `wish`."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise OsdpError(
            "a part of the model is sharded already",
            got=type(model).__name__,
            expected="parts that are only marked: wrapped within enable_wrap",
        )
    marks = {module: mark for module in model.modules() if (mark := _marks.get(module)) is not None}
    shard_chosen(model, {module: mark.wish for module, mark in marks.items()} | {model: wish})
    for module, mark in marks.items():  # not before: what was refused must go on refusing to run
        del _marks[module]
        mark.guard.remove()
    return model


def _refuse(module: nn.Module, _: tuple[Any, ...]) -> NoReturn:
    """Stop the forward of a model that fairscale's own `auto_wrap` left half wrapped."""
    raise OsdpError(
        "the model is marked to be sharded, but is not sharded yet",
        got=type(module).__name__,
        expected="FSDP(model, **fsdp_args) after the `with` block, before the optimizer is made",
        advice="import auto_wrap from osdp.fairscale, which does that",
    )
