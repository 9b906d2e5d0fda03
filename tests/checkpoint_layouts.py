"""A small model in every layout that a plan can give it, and training that needs no communication.

Gradients are drawn from the parameter's name and the step, so that every layout gets the same
numbers, cut to what a rank holds.  Elementwise optimizers must then agree to the last bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from runtime.local_shards import LocalShard, Origin, local_shard, whole, whole_or_nothing

LAYOUTS = ("replicate", "shard", "group_shard", "owner", "slices", "mixed")


def whole_pieces_of(net: nn.Module) -> list[LocalShard]:
    """Return the parameters of a single process."""
    return [local_shard(whole(name, parameter.shape), parameter) for name, parameter in net.named_parameters()]


def linear(seed: int = 0) -> tuple[nn.Linear, list[LocalShard]]:
    """Return a layer of a single process and its parameters."""
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    return net, whole_pieces_of(net)


class Net(nn.Module):
    """Uneven extents, fewer rows than ranks, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 7)
        self.first = nn.Linear(7, 10)
        self.second = nn.Linear(10, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Slices(nn.Module):
    """`second` after it was cut along its inputs: 6 and 4 of them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(4, 5, bias=False)
        with torch.no_grad():
            self.left.weight.copy_(linear.weight[:, :6])
            self.right.weight.copy_(linear.weight[:, 6:])
            self.left.bias.copy_(linear.bias)


SLICED = {
    "second.left.weight": Origin("second.weight", (5, 10), (0, 0), (5, 6)),
    "second.right.weight": Origin("second.weight", (5, 10), (0, 6), (5, 4)),
    "second.left.bias": whole("second.bias", (5,)),
}


def build(layout: str, seed: int) -> tuple[Net, list[LocalShard]]:
    """Return the model in a layout, on the ranks there are, and this rank's shards."""
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean.normal_()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout in ("slices", "mixed"):
        net.second = Slices(net.second)
    if layout == "shard":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "group_shard":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    elif layout == "slices":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(net.second.left, mesh=mesh)
    elif layout == "mixed":
        fully_shard([net.second.right, net.norm], mesh=init_device_mesh("cpu", (world,)))
    owners = {"owner": ["embedding", "first", "second", "norm"], "mixed": ["first"]}.get(layout, [])
    for number, name in enumerate(owners):
        keep_on_one(net.get_submodule(name), number % world)
    return net, list(pieces_of(net, world))


def keep_on_one(module: nn.Module, owner: int) -> None:
    """Empty a module's parameters on all ranks but one."""
    if dist.is_initialized() and dist.get_rank() != owner:
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(parameter.detach()[:0].clone()))


def pieces_of(net: Net, world: int) -> Iterator[LocalShard]:
    shapes = {name: parameter.shape for name, parameter in Net().named_parameters()}
    for name, parameter in net.named_parameters():
        origin = SLICED.get(name) if isinstance(net.second, Slices) else None
        origin = origin or whole(name, shapes[name])
        if parameter.numel() == 0 and type(parameter) is nn.Parameter:
            yield whole_or_nothing(origin, parameter, is_owner=False)
        else:
            yield local_shard(origin, parameter, replicas=world)


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return torch.randn(shape, generator=generator)


def train(shards: list[LocalShard], optimizer: Optimizer, steps: range) -> None:
    """Step with gradients that depend on the name and the step only."""
    for step in steps:
        for shard in shards:
            gradient = torch.zeros_like(shard.parameter)
            shard.local(gradient).copy_(draw(shard.name, shard.shape, step)[shard.slices])
            # As an owner's peers have it: nothing to train, no gradient.
            empty = shard.parameter.numel() == 0
            shard.parameter.grad = None if empty else gradient
        optimizer.step()


def whole_tensors(shards: list[LocalShard], optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Return all parameters, and the optimizer's tensors, whole: what the ranks hold, put together."""
    mine = []
    for shard in shards:
        mine.append((shard.name, shard.shape, shard.slices, shard.local(shard.parameter).clone()))
        for key, value in (optimizer.state.get(shard.parameter, {}) if optimizer else {}).items():
            if value.dim() == 0:
                mine += [(f"{shard.name}/{key}", (), (), value)] if shard.numel else []
            else:
                mine.append((f"{shard.name}/{key}", shard.shape, shard.slices, shard.local(value).clone()))
    gathered = [mine]
    if dist.is_initialized():
        gathered = [mine] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
    tensors: dict[str, Tensor] = {}
    for name, shape, slices, data in (item for each in gathered for item in each):
        tensors.setdefault(name, torch.full(shape, torch.nan))[slices] = data
    return tensors


def groups(net: nn.Module) -> list[dict[str, object]]:
    """Return two parameter groups: matrices decay, vectors do not."""
    by_dim: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in net.parameters():
        by_dim[parameter.dim() > 1].append(parameter)
    return [{"params": by_dim[True], "weight_decay": 0.1}, {"params": by_dim[False], "weight_decay": 0.0}]
