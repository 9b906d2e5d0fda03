"""A model's and its optimizer's state as GlobalTensors under the original model's names.

    model.<name>               parameters, and the buffers that `state_dict` holds
    optimizer.<name>.<state>   state that is laid out as the parameter is, and scalars such as `step`

Nothing here depends on the plan or the number of ranks; `runtime.local_shards` says what a rank holds.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor, nn

from profiler.errors import OsdpError
from runtime.local_shards import LocalShard
from runtime.state.checkpoint_manifest import Manifest
from runtime.state.dcp_tensor import GlobalTensor

NAMES_SHOWN = 5
"""How many names an error lists."""


def model_tensors(module: nn.Module, shards: Sequence[LocalShard]) -> dict[str, GlobalTensor]:
    """Return the parameters and persistent buffers, by key; they share memory with the model's."""
    by_name: dict[str, list[tuple[LocalShard, Tensor]]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append((shard, shard.parameter))
    parameters = {f"model.{name}": assemble(parts) for name, parts in by_name.items() if prod(parts[0][0].shape)}
    kept = {name: buffer for name, buffer in persistent_buffers(module).items() if buffer.numel()}
    buffers = {f"model.{name}": everywhere(buffer) for name, buffer in kept.items()}
    return parameters | buffers


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` holds; every rank has them whole.

    Calling `state_dict` also makes FSDP2 give up parameters that it still holds gathered, as after an
    evaluation; what is loaded into the shards would else not be seen.

    Raises OsdpError if a module has state that is neither a parameter nor a buffer.
    """
    buffers = {id(buffer) for buffer in module.buffers()}
    found = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in buffers:
            found[name] = value
        elif not isinstance(value, Tensor):
            what = f"{name.rpartition('.')[0] or 'the model'} has extra state, which checkpoints do not support"
            raise OsdpError(what, got=f"a {type(value).__name__}", advice="keep it in a buffer")
    return found


def assemble(parts: Sequence[tuple[LocalShard, Tensor]]) -> GlobalTensor:
    """Return the tensor that consists of this rank's data, each laid out as its shard's parameter."""
    shape, dtype = parts[0][0].shape, parts[0][1].dtype
    return GlobalTensor(shape, dtype, tuple((p.offsets, p.local(tensor)) for p, tensor in parts if p.numel))


def everywhere(tensor: Tensor) -> GlobalTensor:
    """Return a tensor that this rank, and others like it, have whole."""
    return GlobalTensor(tuple(tensor.shape), tensor.dtype, (((0,) * tensor.dim(), tensor.detach()),))


def check_model(manifest: Manifest, targets: Mapping[str, GlobalTensor]) -> None:
    """Check that the checkpoint is of this model: the same names and shapes; raises OsdpError.

    Data types may differ: values are converted when they are loaded.
    """
    saved = {key: tensor for key, tensor in manifest.tensors.items() if key.startswith("model.")}
    _refuse("it lacks parameters or buffers of the model", sorted(targets.keys() - saved.keys()))
    _refuse("it has parameters or buffers that the model does not have", sorted(saved.keys() - targets.keys()))
    differing = [key for key, target in targets.items() if saved[key].shape != target.shape]
    if differing:
        expected = ", ".join(f"{_plain(key)} {targets[key].shape}" for key in differing[:NAMES_SHOWN])
        got = ", ".join(f"{_plain(key)} {saved[key].shape}" for key in differing[:NAMES_SHOWN])
        raise OsdpError("shapes differ from the model's", got=got, expected=expected)


def _refuse(what: str, keys: Sequence[str]) -> None:
    if keys:
        more = f" and {len(keys) - NAMES_SHOWN} more" if len(keys) > NAMES_SHOWN else ""
        got = ", ".join(_plain(key) for key in keys[:NAMES_SHOWN]) + more
        raise OsdpError(what, got=got, advice="load it into the model that was saved")


def _plain(key: str) -> str:
    return key.removeprefix("model.")
