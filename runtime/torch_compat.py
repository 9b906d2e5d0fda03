"""What differs between PyTorch versions, and the private parts of FSDP2 that have no replacement.

Run on torch 2.13.0, 2.12.1 and 2.11.0.

    all_gather, reduce_scatter   2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`
    default_timeout              no public name gives it
    AllGather, ReduceScatter     interfaces of custom communication, not exported by torch.distributed.fsdp
    reduce_all_or_none           FSDP2 adds up gradients of several micro-batches without asking whose they are
    complete_reduction           FSDP2 all-reduces only in a backward
    reset_iteration              2.11 has none; that of 2.13 leaves unsharded gradients for the next backward to add to
    free_in_every_backward       2.11 keeps what a reduction left if the backward after it has no gradients to reduce,
                                 2.12 until that has reduced its own
    param_groups                 what FSDP2 gathers and reduces together
    communication_of             what `set_custom_all_gather` and `set_custom_reduce_scatter` have set
    compute_dtypes               the mixed precision policy of a unit
    forget_forward               what `reshard_after_forward=K` keeps for a backward stays where none comes, and 2.11
                                 waits for modules that a forward without gradients has left out
    has_secondary_mesh           whether `reshard_after_forward` of a unit is a number
    packed_parameters            in what order a unit's parameters are gathered, and where their padded rows lie
    gather_for_every_backward    FSDP2 hooks the outputs of one module of a unit only
    hook_nested_tensors          2.11 finds no tensors in dataclasses, and all hook every input by itself, so that one
                                 that is given twice is two in forward
    reduce_when_rerun            where an autograd function's backward runs modules twice, FSDP2 loses gradients
    shard_parts_run_again        FSDP2 keeps a unit gathered of which a part has run again in a backward
    initialise                   FSDP2 takes the module that runs first for the outermost
    gathered                     no public name tells which parameters a forward has gathered
    held_tensor                  `to_local` is an operation, which gradients under odc refuse before they are complete
    uneven_dtensor, placed       `DTensor.from_local` moves its tensor to the mesh's device
    is_fake                      no public name tells whether a tensor has data
    register_first_post_hook     `register_step_post_hook` puts a hook after those of the user
    no_modes                     no public name leaves dispatch modes
    storage_references           no public name counts who holds on to a tensor's memory
    keep_after_forward           when a forward runs again in backward, only newer versions leave what it gathered
                                 gathered, and `set_reshard_after_forward` forgets K, so it cannot be set and set back
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import debug as tensor_debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from profiler.nested_tensors import tensors_in, with_tensors


class OrdinaryMemory:
    """Where custom communication of FSDP2 needs no memory of its own."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's `shard` (s,) of the group into `output` (n s,), in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, shard, group=group)


def reduce_scatter(output: Tensor, full: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Reduce `full` (n s,) over the group and leave this rank's part in `output` (s,)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, full, op=op, group=group)


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group, which `new_group` does not take over by itself."""
    world = cast(Any, dist.group.WORLD)
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            return cast(timedelta, options._timeout)
    return None


def reset_iteration(root: FSDPModule) -> None:
    """Let a model start anew after a forward or backward that failed, or a step that was given up."""
    reset = getattr(root, "reset_iter_state", None)
    if reset is not None:
        reset()
    else:
        _forget_iteration(root._get_fsdp_state())
    for module in cast(nn.Module, root).modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _forget_iteration(root: Any) -> None:
    """Do before torch 2.13 what `reset_iter_state` does since: end what is under way, and put states back to idle.

    Checked on 2.11.
    """
    shared, context = root._comm_ctx, root._state_ctx
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        group = state._fsdp_param_group
        if group is None:
            continue
        work = getattr(group._all_gather_result, "all_gather_work", None)
        if isinstance(work, dist.Work):
            work.wait()
        group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
        group._post_reduce_event = group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    shared.all_gather_state = None
    _forget_reductions(shared)
    shared.post_forward_order.clear()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False


def free_in_every_backward(module: FSDPModule) -> None:
    """Let each backward of a unit free what the last reduction left before it reduces, as since torch 2.13.

    2.11 leaves that where the unit gets no gradients: of one that runs twice, in the first.  In 2.12 a variable of
    `FSDPParamGroup.post_backward` holds it until the unit is reduced.  Checked on both.
    """
    if not hasattr(module, "reset_iter_state"):  # before 2.13
        for group in param_groups(module):
            group.post_backward = partial(_free_and_post_backward, group, group.post_backward)


def _free_and_post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if group.reduce_grads:
        shared = group.comm_ctx
        left = getattr(shared, "reduce_scatter_states", None) or [getattr(shared, "reduce_scatter_state", None)]
        for event in [one.event for one in left if one is not None and one.event is not None]:
            group.device_handle.current_stream().wait_event(event)
        del left
        _forget_reductions(shared)
    post_backward(*unused)


def _forget_reductions(shared: Any) -> None:
    """Let go of what reductions were made of."""
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:  # before 2.12 there is one
        shared.reduce_scatter_state = None


def reduce_all_or_none(module: FSDPModule) -> None:
    """Let a unit that all-reduces once per step have other parameters with a gradient in every micro-batch.

    FSDP2 adds up what it has reduce-scattered as if all micro-batches had the same, and all-reduces it in a backward
    that gives the unit a gradient, or else in a later step.  So the others get zeros, unless theirs are yet to come.
    """
    for group in param_groups(module):
        group.post_backward = partial(_post_backward, group, group.post_backward, set())


def _post_backward(group: Any, post_backward: Callable[..., None], given: set[Any], *unused: Any) -> None:
    """`given`: parameters that had a gradient since the last all-reduce."""
    waits = group._partial_reduce_output is not None
    if not waits:
        given.clear()
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad and hasattr(one, "_unsharded_param")]
    new = [one for one in trained if one._unsharded_param.grad is not None]
    given.update(new)
    filled: list[Any] = []
    comes = not new and any(_is_in_backward(one._unsharded_param) for one in trained)
    if waits and not comes if group.all_reduce_grads else new:
        filled = [one for one in trained if one._unsharded_param.grad is None]
        for one in filled:
            one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
    without = [one.sharded_param for one in filled if one not in given and one.sharded_param.grad is None]
    post_backward(*unused)
    for parameter in without:
        parameter.grad = None


def _is_in_backward(leaf: Tensor) -> bool:
    """Return whether the backward that is running makes a gradient of a leaf."""
    with suppress(RuntimeError):  # none is running, or one for certain inputs
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    return False


def complete_reduction(module: FSDPModule) -> None:
    """All-reduce a unit's gradients where all backwards of a step ran under `set_requires_all_reduce(False)`.

    As the backward of one more micro-batch does in which the unit gets no gradient; see `reduce_all_or_none`.
    """
    for group in param_groups(module):
        if group._partial_reduce_output is None:
            continue
        with patch.multiple(group, all_reduce_grads=True, reduce_grads=True):
            group.post_backward()
        group.finalize_backward()
        group._training_state = TrainingState.IDLE
        _forget_reductions(group.comm_ctx)  # what it held is ordered before what comes now


@contextmanager
def keep_after_forward(module: FSDPModule) -> Iterator[None]:
    """Keep the parameters of a unit unsharded after a forward: their backward follows at once."""
    with ExitStack() as stack:
        stack.callback(_free_last_gather, module)  # also of a forward that is stopped early
        for group in param_groups(module):
            kept = patch.multiple(group, reshard=lambda: None, _record_post_forward=lambda: None)
            stack.enter_context(kept)
        yield


def _free_last_gather(module: FSDPModule) -> None:
    """Free the buffer of the last gather of a forward, as FSDP2 does where the unit that began the forward ends.

    In a backward that unit may be one that has been gathered for it, of which FSDP2 sees no end.
    """
    state = cast(Any, module)._get_fsdp_state()
    if (gathered := state._comm_ctx.all_gather_state) is not None:
        for stream in (state._comm_ctx.all_gather_copy_in_stream, state._comm_ctx.all_gather_stream):
            stream.wait_event(gathered.event)
        state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None


def param_groups(module: FSDPModule) -> list[Any]:
    """Return what FSDP2 gathers and reduces together of a unit, which no public name tells."""
    return groups_of(cast(Any, module)._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    """Return the same of FSDP2's state of a unit."""
    groups = getattr(state, "_fsdp_param_groups", None)  # 2.13 allows for several
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def communication_of(module: FSDPModule) -> tuple[AllGather, ReduceScatter] | None:
    """Return how a unit gathers and reduces, FSDP2's own way or a custom one; None if it has no parameters."""
    groups = param_groups(module)
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if groups else None


def compute_dtypes(module: FSDPModule) -> list[torch.dtype | None]:
    """Return what each group of parameters of a unit, there is one as a rule, computes in; None: what they have."""
    return [group.mp_policy.param_dtype for group in param_groups(module)]


def has_secondary_mesh(module: FSDPModule) -> bool:
    """Whether a unit was wrapped with `reshard_after_forward=K`."""
    return any(group._use_post_forward_mesh for group in param_groups(module))


def forget_forward(module: FSDPModule) -> None:
    """Let a unit that is sharded again begin anew, though no backward came: free what K has kept for one.

    Before 2.13 a unit gathers nothing while one of its modules that a forward without gradients has left out is due.
    """
    cast(Any, module)._get_fsdp_state()._modules_to_run_forward.clear()
    for group in param_groups(module):
        for one in group.fsdp_params if group._use_post_forward_mesh and group.is_sharded else ():
            one._sharded_post_forward_param = one._sharded_post_forward_param_data = None


def packed_parameters(module: FSDPModule) -> list[Any]:
    """Return FSDP2's view of a unit's parameters, in the order in which it gathers and reduces them.

    Of each, `sharded_param` is the parameter that rests, and `_sharded_param_data` (s,) its rows on this rank,
    padded with zeros to as many as every other rank has.
    """
    return [parameter for group in param_groups(module) for parameter in group.fsdp_params]


def gather_for_every_backward(first: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Gather a unit before the backward of any of its modules, which `fully_shard` has wrapped together.

    FSDP2 does it before the backward of the one that runs last, which may have none: a frozen embedding, a head whose
    output is not in the loss.
    """
    state = cast(Any, first)._get_fsdp_state()
    for module in modules:
        module.register_forward_hook(lambda module, args, output: state._register_pre_backward_hook(output))


def reshard_without(first: FSDPModule, modules: Sequence[nn.Module], uncalled: Collection[nn.Module]) -> None:
    """End a unit's forward when those of its modules have run that are called, instead of at the end of the model's.

    FSDP2 waits for each of the modules that it wraps together, and an alias of an embedding may never run.
    """
    waiting: set[nn.Module] = cast(Any, first)._get_fsdp_state()._modules_to_run_forward
    for module in modules:
        if module not in uncalled:
            module.register_forward_pre_hook(lambda module, args: waiting.difference_update(uncalled))


def shard_parts_run_again(first: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Shard a unit of which some modules only have run again in a backward when the forward of another begins there.

    FSDP2 waits for all of them, and so keeps the unit gathered until it runs back, and the buffer of that gather until
    the next: where a checkpoint of the model's own begins within modules that are wrapped together.
    """
    state = cast(Any, first)._get_fsdp_state()

    def begin(module: nn.Module, args: Any) -> None:
        left = getattr(state._state_ctx, "run_in_part", None) if is_bw() else None
        if left is not None:
            state._state_ctx.run_in_part = None  # if it is this one, more of it runs, in which others may begin
            if left is not first:
                _shard_part(left)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        is_part = state._training_state == TrainingState.FORWARD and state._modules_to_run_forward
        # What `keep_after_forward` keeps has no `reshard` of its class.
        if is_bw() and is_part and not any("reshard" in vars(group) for group in param_groups(first)):
            state._state_ctx.run_in_part = first
            _free_last_gather(first)

    for module in modules:
        module.register_forward_pre_hook(begin, prepend=True)
        if len(modules) > 1:
            module.register_forward_hook(end)


def _shard_part(module: FSDPModule) -> None:
    state = cast(Any, module)._get_fsdp_state()
    if state._training_state == TrainingState.FORWARD:  # else its backward has begun, or is over
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in param_groups(module):
            group._training_state = TrainingState.IDLE
            group.reshard()


def hook_nested_tensors(first: FSDPModule) -> None:
    """Let FSDP2 find the tensors that a unit's modules are handed and return in dataclasses too, and each but once.

    torch 2.11 looks into none: a unit's parameters would not be there in its backward.  And
    `nn.MultiheadAttention` projects queries, keys and values together if they are one tensor, and so does what a trace
    of the model has seen.
    """
    state = cast(Any, first)._get_fsdp_state()
    state._register_pre_backward_hook = partial(_hook_outputs, state._register_pre_backward_hook)
    for group in param_groups(first):
        group._register_post_backward_hook = partial(_hook_inputs, group._register_post_backward_hook)


def _hook_outputs(register: Callable[[Any], Any], output: Any) -> Any:
    if isinstance(output, Tensor) or torch.compiler.is_compiling():
        return register(output)
    register(tensors_in(output))
    return output


def _hook_inputs(
    register: Callable[..., tuple[Any, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
    hooked = dict(zip(tensors, tree_leaves(register((*tensors.values(),), {})), strict=True))
    return with_tensors((args, kwargs), lambda tensor: hooked.get(id(tensor), tensor)) if hooked else (args, kwargs)


def reduce_when_rerun(first: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Reduce a unit's gradients whenever an autograd function has run its modules forward and back in its backward.

    FSDP2 takes a forward within a backward for one whose graph is there already, and drops the gradients of all but
    the first of several.  Before 2.13 it also gathers nothing for a module that runs again while another of the unit's
    has not, though a backward between may have sharded them.
    """
    state = cast(Any, first)._get_fsdp_state()

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if state._training_state == TrainingState.PRE_BACKWARD and torch.is_grad_enabled():
            if not hasattr(first, "reset_iter_state"):  # before 2.13
                state._modules_to_run_forward.clear()
            for group in param_groups(first):
                args, kwargs = group._register_post_backward_hook(args, kwargs)
        return args, kwargs

    for module in modules:
        # Where FSDP2 has its own: so what it makes copies of is given back (`profiler.handed_containers`).
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)


def initialise(root: FSDPModule) -> None:
    """Make this the outermost module, whichever of its modules runs first: by a method other than forward."""
    cast(Any, root)._get_fsdp_state()._lazy_init()


def gathered(module: FSDPModule, parameters: Mapping[int, nn.Parameter]) -> set[int]:
    """Return which of these, by identity, a unit's modules have had in place of parameters that rest.

    After a forward with `reshard_after_forward=K` that is a new one each time, on a mesh that nothing of it rests on.
    What rests on an equal mesh is another model's: DTensors of equal meshes can have the same one.
    """
    own = {id(getattr(one, "_unsharded_param", None)) for one in packed_parameters(module)}
    secondary = [group.post_forward_mesh_info.mesh for group in param_groups(module) if group._use_post_forward_mesh]
    elsewhere = {
        key
        for key, one in (parameters.items() if secondary else ())
        if isinstance(one, DTensor) and any(one.device_mesh is mesh for mesh in secondary) and not _rests_in_a_unit(one)
    }
    return own & parameters.keys() | elsewhere


def _rests_in_a_unit(parameter: nn.Parameter) -> bool:
    """Return whether it is of a unit of FSDP2, of any model in this process."""
    units = [module for module in _composable_state._module_state_mapping if isinstance(module, FSDPModule)]
    return any(parameter is one.sharded_param for unit in units for one in packed_parameters(unit))


def uneven_dtensor(local: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Return a DTensor of `shape` whose rows the ranks of a mesh share in any way; this one has `local`.

    They share them along the mesh's last dimension, and are replicas of each other along another.
    `local` stays where it is, as with FSDP2: parameters rest on the host and the mesh is of GPUs.
    """
    return placed(local, mesh, [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)], shape)


def placed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor of which this rank holds `local`, which stays where it is."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return cast(Any, DTensor)(local, spec, requires_grad=False)  # type: ignore[no-any-return]


def held_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor that a DTensor holds on this rank, without an operation; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def take_held(module: FSDPModule) -> None:
    """Let a unit that is sharded gather what its parameters hold since somebody wrote to their `.data`."""
    for one in packed_parameters(module):
        if getattr(one.sharded_param, "_holds_another", False):
            one.sharded_param._holds_another = False
            one.reset_sharded_param()


def register_first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[[Any, Any, Any], None]) -> None:
    """Have a hook run after an optimizer's steps, before those that it has."""
    handle = optimizer.register_step_post_hook(hook)
    cast(Any, optimizer)._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


def no_modes() -> AbstractContextManager[None]:
    """Leave the dispatch modes that are entered, such as a dry run's fake tensors, for what is computed within."""
    return cast(AbstractContextManager[None], _python_dispatch._disable_current_modes())


def forget_meshes() -> None:
    """Clear DTensor's cache of meshes: equal ones of an earlier world name groups that are gone."""
    clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def storage_references(tensor: Tensor) -> int:
    """Return how many tensors, and others, hold on to a tensor's memory (private; checked on torch 2.11 and 2.13)."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
