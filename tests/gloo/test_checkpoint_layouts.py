"""Saved under one layout on some ranks, resumed under another on others: the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_layouts import LAYOUTS, build, groups, train, whole_tensors
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runtime.local_shards import LocalShard, local_shard, whole
from runtime.state.checkpoint import latest, load, save

ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}


def make_adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return what steps parameters one by one, and alike in every layout: the fused one does not to the last bit."""
    return torch.optim.AdamW(groups(net), **(ADAM | options))


def reference(steps: int) -> dict[str, Tensor]:
    """Return what a single process has after so many steps."""
    net, shards = build("replicate", seed=1)
    optimizer = make_adam(net)
    train(shards, optimizer, range(steps))
    return whole_tensors(shards, optimizer)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def save_all(rank: int, folder: str) -> None:
    for layout in LAYOUTS:
        net, shards = build(layout, seed=1)
        net.norm.num_batches_tracked += 41
        optimizer = make_adam(net)
        train(shards, optimizer, range(3))
        save(f"{folder}/{layout}", net, shards, optimizer, {"layout": layout}).wait()


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks under every layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(save_all, 4, str(folder))
    return folder


def load_all(rank: int, folder: str, first: int, others: int) -> list[tuple[str, str, Any]]:
    """Load every checkpoint under layouts from the `first`-th after its own on; tell what came in, and train on."""
    found = []
    for number, saved in enumerate(LAYOUTS):
        for layout in (LAYOUTS * 2)[number + first : number + first + others]:
            net, shards = build(layout, seed=2)
            optimizer = make_adam(net, lr=9.0, betas=(0.1, 0.2))
            extra = load(f"{folder}/{saved}", net, shards, optimizer)
            loaded = whole_tensors(shards, optimizer)
            train(shards, optimizer, range(3, 5))
            options = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
            buffers = (net.norm.num_batches_tracked, net.norm.running_mean, net.mask)
            layouts_agree = all(
                type(value) is type(shard.parameter.data)
                for shard in shards
                for name, value in optimizer.state[shard.parameter].items()
                if name != "step"
            )
            found.append(
                (saved, layout, (extra, loaded, whole_tensors(shards, optimizer), options, buffers, layouts_agree))
            )
    return found


# If thorough, every layout under every other; else each under two others in all.
@pytest.mark.parametrize(
    ("writers", "readers", "first", "others"),
    [(4, 2, 0, 6), (2, 4, 3, 3)] if THOROUGH else [(4, 2, 1, 1), (2, 4, 3, 1)],
)
def test_any_layout_resumes_under_any_other_and_other_ranks(
    tmp_path: Path, saved_by_four: Path, writers: int, readers: int, first: int, others: int
) -> None:
    folder = saved_by_four if writers == 4 else tmp_path
    if writers != 4:
        run_ranks(save_all, writers, str(folder))
    after_3, after_5 = reference(3), reference(5)
    mean = build("replicate", seed=1)[0].norm.running_mean
    found = run_ranks(load_all, readers, str(folder), first, others)[0]
    assert len(found) == len(LAYOUTS) * others
    for saved, layout, (extra, loaded, continued, options, buffers, layouts_agree) in found:
        assert extra == {"layout": saved}
        assert_equal(loaded, after_3)
        assert_equal(continued, after_5)
        assert options == [(0.01, (0.8, 0.95), 0.1), (0.01, (0.8, 0.95), 0.0)], layout
        assert buffers[0] == 41
        assert torch.equal(buffers[1], mean)
        assert layouts_agree


def test_a_single_process_reads_what_many_wrote(saved_by_four: Path) -> None:
    for saved in LAYOUTS:
        net, shards = build("replicate", seed=2)
        load(saved_by_four / saved, net, shards)
        expected = {name: tensor for name, tensor in reference(3).items() if "/" not in name}
        assert_equal(whole_tensors(shards), expected)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp_mlp(mesh_shape: tuple[int, ...]) -> tuple[nn.Module, list[LocalShard]]:
    torch.manual_seed(0)
    net = Mlp()
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    for part in (net.up, net.down, net):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return net, [local_shard(whole(name, shapes[name]), p) for name, p in net.named_parameters()]


def train_save_and_resume(rank: int, folder: str, *mesh_shapes: tuple[int, ...]) -> list[list[float]]:
    """Return the losses of the run that saves, and of those that go on from there on these meshes."""
    return [train_and_save(folder), *load_and_train(rank, folder, *mesh_shapes)]


def train_and_save(folder: str) -> list[float]:
    net, shards = fsdp_mlp((4,))
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    losses = fit(net, optimizer, range(3))
    saving = save(f"{folder}/step-3", net, shards, optimizer, asynchronous=True)
    losses += fit(net, optimizer, range(3, 6))  # the copy must not see these
    saving.wait()
    return losses


def load_and_train(rank: int, folder: str, *mesh_shapes: tuple[int, ...]) -> list[list[float]]:
    return [load_and_train_on(folder, mesh_shape) for mesh_shape in mesh_shapes]


def load_and_train_on(folder: str, mesh_shape: tuple[int, ...]) -> list[float]:
    net, shards = fsdp_mlp(mesh_shape)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    with torch.no_grad():
        net(torch.zeros(1, 6))  # leaves parameters gathered, which must not outlive the load
    load(f"{folder}/step-3", net, shards, optimizer)
    return fit(net, optimizer, range(3, 6))


def test_fully_shard_trains_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    saved, alike, in_groups = run_ranks(train_save_and_resume, 4, str(tmp_path), (4,), (2, 2))[0]
    torch.manual_seed(0)
    net = Mlp()
    alone = fit(net, torch.optim.Adam(net.parameters(), 0.05), range(6))
    assert saved == pytest.approx(alone, rel=1e-5)
    (of_two,) = run_ranks(load_and_train, 2, str(tmp_path), (2,))[0]
    assert alike == saved[3:]
    assert of_two == pytest.approx(alone[3:], rel=1e-5)
    assert in_groups == pytest.approx(alone[3:], rel=1e-5)


def save_twice(rank: int, folder: str) -> tuple[bool, str]:
    net, shards = build("shard", seed=1)
    optimizer = make_adam(net)
    first = save(f"{folder}/step-1", net, shards, optimizer, asynchronous=True)
    second = save(f"{folder}/step-2", net, shards, optimizer, asynchronous=True)
    first_was_done = first.done
    second.wait()
    dist.barrier()
    newest = latest(Path(folder))
    assert newest is not None
    return first_was_done, newest.name


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    assert run_ranks(save_twice, 2, str(tmp_path)) == [(True, "step-2")] * 2


def file_sizes(rank: int, folder: str) -> None:
    net = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
    shards = [local_shard(whole(name, p.shape), p, replicas=4) for name, p in net.named_parameters()]
    save(f"{folder}/step-1", net, shards)


def test_replicated_parameters_are_written_once_and_by_all(tmp_path: Path) -> None:
    run_ranks(file_sizes, 4, str(tmp_path))
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")]
    one = 64 * 64 * 4
    assert len(sizes) == 4
    assert all(2 * one <= size < 2.5 * one for size in sizes), sizes
