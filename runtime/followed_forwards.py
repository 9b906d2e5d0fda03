"""Which forwards of FSDP2's units a backward follows: it prefetches in the order of all, and keeps what runs again."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.utils._pytree import tree_leaves

from runtime.torch_compat import groups_of, param_groups


def follow_forwards(module: FSDPModule) -> None:
    """Prefetch for backwards in the order of forwards that some follow, and reshard where forwards run again.

    FSDP2 takes the last forward of a unit for the one that runs back first: of a frozen network that ran once more on a
    target, it gathers units of which no backward comes.  And of a forward that runs again in a backward it keeps all
    units gathered: in a checkpoint around many blocks, the parameters of all.  Checked on 2.11, 2.12 (both read) and
    2.13 (run).  What ends such a forward is no end of the model's, at which 2.13 ends those of all units whose modules
    have not all run: others, which share parameters with some that run again, run back after that.
    """
    state = cast(Any, module)._get_fsdp_state()
    if (complete := getattr(state, "_force_complete_incomplete_states", None)) is not None:
        state._force_complete_incomplete_states = lambda output: output if is_bw() else complete(output)
    for group in param_groups(module):
        returned: set[nn.Module] = set()
        group.post_forward = partial(_post_forward, group, group.post_forward, returned)
        for one in group.modules if len(group.modules) > 1 else ():
            one.register_forward_hook(partial(_note_returned, returned), prepend=True)  # FSDP2's may end the forward


def end_units_in_part(root: FSDPModule) -> None:
    """As a forward of the model ends, end those of units whose modules have not all run, as torch does since 2.13.

    Otherwise what of such a unit runs last is never followed by a backward that gathers it.  Checked on 2.11 and 2.12.
    """
    state = cast(Any, root)._get_fsdp_state()
    if not hasattr(state, "_force_complete_incomplete_states"):
        state._register_pre_backward_hook = partial(_end_model, state, state._register_pre_backward_hook)


def _end_model(state: Any, register: Callable[[Any], Any], output: Any) -> Any:
    output, context = register(output), state._state_ctx
    if context.iter_forward_root is not state or is_bw():
        return output
    for other in reversed(context.all_states):
        if other is not state and other._modules_to_run_forward:
            for group in groups_of(other):
                output = group.post_forward(None, None, output)
            output = other._register_pre_backward_hook(output)
            other._training_state = TrainingState.IDLE
            other._modules_to_run_forward.clear()
    return output


def _note_returned(returned: set[nn.Module], module: nn.Module, args: Any, output: Any) -> None:
    """Note of a module that is wrapped together with others that a backward comes of it: FSDP2 hands on what the last
    of them returns, which may be frozen."""
    if not is_bw() and _needs_gradient(output):
        returned.add(module)


def _post_forward(
    group: Any, post_forward: Callable[..., Any], returned: set[nn.Module], module: nn.Module, args: Any, output: Any
) -> Any:
    """`returned`: modules of the unit whose forwards returned what needs a gradient since the last that ended it."""
    if is_bw():
        group.reshard()
    comes = bool(returned) or _needs_gradient(output)
    returned.clear()
    if comes:
        return post_forward(module, args, output)
    with patch.object(group, "_record_post_forward", lambda: None):
        return post_forward(module, args, output)


def _needs_gradient(output: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
