"""OSDP under fairscale's `auto_wrap`: the first release's example on 2 x 2 ranks, against one process."""

from __future__ import annotations

import functools
import os
import subprocess
from collections import Counter
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
from fairscale.nn.wrap import auto_wrap as fairscale_auto_wrap
from fairscale.nn.wrap import wrap
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp.compat.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args
from osdp.models.bert import Bert
from osdp.models.config import BertConfig
from profiler.errors import OsdpError
from runtime.observe.collective_log import record_collectives

BATCH, LENGTH = 2, 8
CONFIG = BertConfig(
    vocabulary_size=29, maximum_positions=LENGTH, token_types=2, hidden_size=16, layers=1, heads=2, intermediate_size=24
)
LARGE = 250
"""Parameters from which a module is wrapped: every linear layer and table, but neither norms nor small tables."""
GSDP_TYPES = ("group_sharding", "communication_with_groups", "none")
Losses = list[float]
Sent = Counter[tuple[str, tuple[int, ...]]]


class Own(nn.Module):
    """A model of a user's own: a parameter in the model itself, and a layer that its constructor wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.up, self.down = nn.Linear(5, 60), wrap(nn.Linear(60, 5))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5) -> a loss."""
        loss: Tensor = (self.down(self.up(x).relu()) * self.scale).square().mean()
        return loss


def bert() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's values are taken
    return Bert(CONFIG)


def inputs(step: int, rank: int) -> dict[str, Tensor]:
    """Return a rank's batch of BERT."""
    random = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(29, (BATCH, LENGTH), generator=random)
    types = torch.randint(2, (BATCH, LENGTH), generator=random)
    is_random = torch.randint(2, (BATCH,), generator=random)
    return {"input_ids": tokens, "labels": tokens, "token_type_ids": types, "next_sentence_labels": is_random}


def train_one_process() -> tuple[Losses, dict[str, Tensor]]:
    """Return losses and parameters of training on all ranks' batches at once."""
    model, losses = bert(), []
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        parts = [inputs(step, rank) for rank in range(4)]
        optim.zero_grad()
        loss = torch.stack([model(**part) for part in parts]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        optim.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_wrapped(rank: int, gsdp_type: str) -> tuple[Losses, dict[str, Tensor], Sent]:
    """Train as the first release's example wraps; return what the reference returns, and what one step sends."""
    model = bert()
    fsdp_args = gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type=gsdp_type, model_type="bert-large")
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=LARGE)
        model = auto_wrap(model, auto_wrap_policy=my_auto_wrap_policy)  # auto_wrap
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, sent = [], Counter[tuple[str, tuple[int, ...]]]()
    for step in range(STEPS):
        optim.zero_grad()
        with record_collectives() as record:
            loss = model(**inputs(step, rank))
            loss.backward()
        sent = Counter((each.operation, each.ranks) for each in record)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / 4)
    return losses, whole(model), sent


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters of a sharded model. A collective call."""
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.full_tensor().detach()
    return found


def expected_traffic(gsdp_type: str, rank: int) -> Sent:
    """Return what a rank of 2 x 2 sends in a step.

    Wrapped are 6 linear layers of the block, that of the token head, the pooler, and embedding and decoder, which
    are tied, as one: 9.  Norms, positions (8 x 16), types and the head of 2 x 16 + 2 are left to the model itself.
    """
    units = 6 + 4
    node = (0, 1) if rank < 2 else (2, 3)
    across = (rank % 2, rank % 2 + 2)
    gathers, world = 2 * units, (0, 1, 2, 3)
    match gsdp_type:
        case "group_sharding":
            return Counter(
                {("all_gather", node): gathers, ("reduce_scatter", node): units, ("all_reduce", across): units}
            )
        case "communication_with_groups":
            return Counter(
                {
                    ("all_gather", across): gathers,
                    ("all_gather", node): gathers,
                    ("reduce_scatter", node): units,
                    ("reduce_scatter", across): units,
                }
            )
    return Counter({("all_gather", world): gathers, ("reduce_scatter", world): units})


@pytest.fixture(scope="module")
def reference() -> tuple[Losses, dict[str, Tensor]]:
    return train_one_process()


def train_each(rank: int) -> dict[str, tuple[Losses, dict[str, Tensor], Sent]]:
    return {gsdp_type: train_wrapped(rank, gsdp_type) for gsdp_type in GSDP_TYPES}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, tuple[Losses, dict[str, Tensor], Sent]]]:
    return run_ranks(train_each, 4)


@pytest.mark.parametrize("gsdp_type", GSDP_TYPES)
def test_the_example_trains_as_one_process_does(
    gsdp_type: str,
    reference: tuple[Losses, dict[str, Tensor]],
    by_rank: list[dict[str, tuple[Losses, dict[str, Tensor], Sent]]],
) -> None:
    for rank, of_rank in enumerate(by_rank):
        losses, parameters, sent = of_rank[gsdp_type]
        assert losses == pytest.approx(reference[0], rel=1e-5)
        assert parameters.keys() == reference[1].keys()  # names stay, tied weights under the first
        for name, value in reference[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5)
        assert sent == expected_traffic(gsdp_type, rank)


def own_inputs() -> Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5)


def train_own(rank: int) -> tuple[dict[str, Tensor], int]:
    """Train one step of a model that wraps a part of itself; return parameters and how often gradients were reduced."""
    torch.manual_seed(0)
    fsdp_args = gen_fsdp_args(2, 2, "communication_with_groups", "mine")
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        model: nn.Module = Own()
    x = own_inputs()[rank : rank + 1]
    with pytest.raises(OsdpError, match="is not sharded yet"):
        model(x)
    model = FSDP(model, **fsdp_args)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_collectives() as record:
        model(x).backward()
    optim.step()
    return whole(model), sum(each.operation == "reduce_scatter" for each in record)


def test_a_model_that_wraps_a_part_of_itself() -> None:
    torch.manual_seed(0)
    model = Own()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(own_inputs()).backward()
    optim.step()
    for parameters, reductions in run_ranks(train_own, 4):
        assert reductions == 2 * 2  # of `down` and of the rest, each in two phases
        for name, value in model.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach(), rtol=1e-5, atol=1e-7)


def refuse(rank: int) -> None:
    """Do everything that is refused."""
    with pytest.raises(OsdpError, match="another number of ranks"):
        gen_fsdp_args(2, 2, "group_sharding", "bert-large")
    with pytest.raises(OsdpError, match="does not take these options") as refusal:
        FSDP(nn.Linear(2, 2), flatten_parameters=True)
    assert "flatten_parameters=True" in str(refusal.value)
    with pytest.raises(OsdpError, match="does not know this precision"):
        FSDP(nn.Linear(2, 2), precision="fp16")
    wrapped = FSDP(nn.Linear(2, 2))
    with pytest.raises(OsdpError, match="wrapped already"):
        FSDP(wrapped)
    with pytest.raises(OsdpError, match="a part of the model is sharded already"):
        FSDP(nn.Sequential(wrapped))
    with enable_wrap(wrapper_cls=FSDP), pytest.raises(OsdpError, match="wrapped already"):
        wrap(wrap(nn.Linear(2, 2)))
    policy = functools.partial(default_auto_wrap_policy, min_num_params=1)
    with enable_wrap(wrapper_cls=FSDP):
        model = fairscale_auto_wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), policy)
    with pytest.raises(OsdpError, match=r"import auto_wrap from osdp\.fairscale"):
        model(torch.ones(1, 2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with enable_wrap(wrapper_cls=FSDP):
        wrap(tied[0]), wrap(tied[1], precision="bf16")
    with pytest.raises(OsdpError, match="1 is wrapped for other ranks or another precision"):
        FSDP(tied)


def test_what_cannot_be_wrapped_is_refused() -> None:
    run_ranks(refuse, 2)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    checkout = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = (programs.python(), str(checkout / "scripts" / "bench" / "fairscale_fsdp.py"), *arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not THOROUGH, reason="a benchmark, with --thorough only")
def test_the_benchmark_compares_the_settings_on_cpu_ranks() -> None:
    """It fails by itself if losses differ."""
    done = bench(
        "--device",
        "cpu",
        "--nodes",
        "2",
        "--model",
        "bert-tiny",
        "--seq",
        "16",
        "--large",
        "4000",
        "--batch",
        "1",
        "--rounds",
        "2",
        "--warm-up",
        "1",
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("OSDP, ")]
    assert rows == ["OSDP, none", "OSDP, communication_with_groups", "OSDP, group_sharding"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs, which it would use")
def test_the_benchmark_says_that_it_needs_gpus() -> None:
    done = bench()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("osdp: error: fairscale's own FSDP needs GPUs, and torch sees none\n")
