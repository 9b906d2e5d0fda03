"""Makes `get_model_state_dict` and `set_model_state_dict` of `torch.distributed.checkpoint` right for full state dicts.

By themselves they know neither GlobalTensors nor DTensors that ranks share unevenly.  Three functions that their module
looks up when it is called are replaced (private names, checked on torch 2.13); what else they are given is left to
PyTorch.  `broadcast_from_rank0` is refused for such tensors of an optimizer: ranks would wait for each other.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from profiler.errors import OsdpError
from runtime.state.dcp_tensor import GlobalTensor


@cache
def watch_full_state_dicts(device: torch.device) -> None:
    """Have full state dicts hold whole tensors, gathered on a device."""
    by_torch: Any = dcp_state_dict
    gather_by_torch, distribute_by_torch = by_torch._gather_state_dict, by_torch._distribute_state_dict

    def gather(state: dict[str, Any], **options: Any) -> dict[str, Any]:
        whole = {name: one.gather(device) if isinstance(one, GlobalTensor) else one for name, one in state.items()}
        gathered: dict[str, Any] = gather_by_torch(whole, **options)
        return gathered

    def distribute(full: dict[str, Any], local: dict[str, Any], **options: Any) -> None:
        for name in [name for name, one in local.items() if _is_uneven(one)]:
            if name in full:
                del local[name]  # what is loaded then is the whole tensor, of which a model takes its part
        distribute_by_torch({name: full[name] for name in full if name in local}, local, **options)

    broadcast_by_torch = by_torch._broadcast_state_dict

    def broadcast(full: dict[str, Any], local: dict[str, Any], *others: Any, **options: Any) -> None:
        uneven = [name for name, one in local.items() if isinstance(one, GlobalTensor) or _is_uneven(one)]
        if uneven and "strict" not in options:  # which PyTorch says of a model's states, not of an optimizer's
            what = f"broadcast_from_rank0 cannot load `{uneven[0]}`, which ranks do not share evenly"
            advice = "give every rank the whole state dict: StateDictOptions(full_state_dict=True)"
            raise OsdpError(what, expected="broadcast_from_rank0=False", advice=advice)
        sent = [list(full)]
        dist.broadcast_object_list(sent, src=0)
        # Names that PyTorch does not find by itself are those of split operators.  For a plain tensor it leaves the
        # whole one that rank 0 sent, of which a model takes its part.
        split = (name for name in sent[0] if name not in local) if "strict" in options else ()
        local |= {name: torch.empty(0) for name in (*(name for name in uneven if name in sent[0]), *split)}
        broadcast_by_torch(full, local, *others, **options)

    by_torch._gather_state_dict, by_torch._distribute_state_dict = gather, distribute
    by_torch._broadcast_state_dict = broadcast


def _is_uneven(tensor: Any) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.to_local().shape) != tuple(shape)
