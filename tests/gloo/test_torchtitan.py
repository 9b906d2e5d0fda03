"""osdp/integrations/torchtitan.py: what torchtitan's trainer does with a model, against one process by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import examples_path  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integrations import torchtitan_model as example
from one_process import compare
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from toys import plan_of, refusal

from osdp.integrations.torchtitan import parallelize
from planner.plan import Plan

RANKS, BATCH, LENGTH, ACCUMULATION, STEPS = 2, 2, 8, 2, 4
MAX_NORM = 0.2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def split_qkv(block: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Take a fused projection apart in a state dict, as models of torchtitan 0.3 do by a collective call."""
    fused = state.pop(f"{prefix}qkv.weight")
    whole = fused.full_tensor() if isinstance(fused, DTensor) else fused
    state |= {f"{prefix}{name}.weight": part for name, part in zip("qkv", whole.chunk(3), strict=True)}


def build() -> nn.Module:
    """Return the model, without values that count."""
    model = example.Decoder(LENGTH)
    model.layers["2"].register_state_dict_post_hook(split_qkv)
    return model


def plan(default: str = "shard", **choices: str) -> Plan:
    """Return a plan that shards most, replicates some, and recomputes two blocks."""
    mixed = {"layers.1.qkv": "replicate", "norm": "replicate", "layers.2.w1": "shard_grad", **choices}

    def tokens(batch: int) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (torch.zeros(batch, LENGTH, dtype=torch.long),), {}

    model = build()
    model.example_inputs = tokens  # type: ignore[assignment]
    return plan_of(model, default, mixed, recomputed=("layers.0", "layers.3"), ranks=(1, RANKS))


def training(**changes: Any) -> SimpleNamespace:
    """Return the section `training` of torchtitan's configuration, as far as it is read."""
    sizes = {"local_batch_size": BATCH, "global_batch_size": ACCUMULATION * BATCH * RANKS, "seq_len": LENGTH}
    others = {"max_norm": MAX_NORM, "mixed_precision_param": "float32", "enable_cpu_offload": False}
    return SimpleNamespace(**{**sizes, **others, **changes})


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer, as torchtitan makes it by default."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True)


def batch_of(step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, of which ranks have unlike numbers that count."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    tokens = torch.randint(example.VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[0, : 3 * rank + index] = example.IGNORED
    return tokens[:, :-1], labels


Seen = tuple[list[tuple[float, float]], float, dict[str, Tensor]]
"""Losses per token with the norms of gradients, the loss of a batch held out, and what was learnt."""


def reference() -> Seen:
    """Train in one process."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        batches = [batch_of(step, index, rank) for index in range(ACCUMULATION) for rank in range(RANKS)]
        tokens = sum(int((labels != example.IGNORED).sum()) for _, labels in batches)
        loss = sum(example.summed_loss(model(inputs), labels) for inputs, labels in batches) / tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), norm.item()))
    with torch.no_grad():
        inputs, labels = batch_of(STEPS, 0, 0)
        held_out = example.summed_loss(model(inputs), labels).item()
    return losses, held_out, {name: one.detach() for name, one in model.named_parameters()}


def trainer(description: Any, **changes: Any) -> example.Trainer:
    torch.manual_seed(5)
    return example.Trainer(parallelize(description), build, training(**changes), optimizer_of)


def train(rank: int, of_plan: Plan, folder: Path) -> Seen:
    """Train half, save, load into another model and optimizer, and go on; torchtitan's checkpoints are these calls."""
    losses, made = [], trainer(of_plan)
    kept = get_model_state_dict(made.model)  # torchtitan asks once, before the first step
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = kept | get_optimizer_state_dict(made.model, made.optimizer, options=FLAT)
            dcp.save(saved, checkpoint_id=folder)
            made = trainer(of_plan)
            state = get_model_state_dict(made.model)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(made.model, state, options=StateDictOptions(strict=False))
            moments = get_optimizer_state_dict(made.model, made.optimizer, options=FLAT)
            dcp.load(moments, checkpoint_id=folder)
            set_optimizer_state_dict(made.model, made.optimizer, moments, options=FLAT)
        losses.append(made.train_step([batch_of(step, index, rank) for index in range(ACCUMULATION)]))
    made.model.eval()
    with torch.no_grad():
        inputs, labels = batch_of(STEPS, 0, 0)
        held_out = example.summed_loss(made.model(inputs), labels).item()
    return losses, held_out, made.model.full_state_dict()


def refused() -> list[str]:
    """Return what is said of what cannot work."""
    made = trainer({"optimizer": "adamw"})
    owned = trainer(plan(**{"output": "owner"}))
    off = dict.fromkeys(("tp_enabled", "cp_enabled", "pp_enabled", "ep_enabled", "dp_replicate_enabled"), False)

    def dims(**on: bool) -> Any:
        return SimpleNamespace(world_size=RANKS, **{**off, **on})

    def ask(dims: Any, **changes: Any) -> str:
        with torch.device("meta"):
            model = build()
        # as 0.2 calls it
        config = SimpleNamespace(training=training(**changes), compile=SimpleNamespace(enable=False))
        return refusal(lambda: parallelize(plan())(model, dims, config))

    return [
        refusal(lambda: setattr(made.model, "_skip_lm_head", True)),
        refusal(lambda: get_model_state_dict(owned.model)),
        ask(dims(tp_enabled=True)),
        ask(dims(dp_replicate_enabled=True)),
        ask(dims(), enable_cpu_offload=True),
        ask(dims(), mixed_precision_param="bfloat16"),
        ask(dims(), local_batch_size=4),
    ]


SAID = (
    "torchtitan's chunked loss runs the head outside",
    "torchtitan's checkpoints cannot hold parameters",
    "got: tp enabled",
    "got: data_parallel_replicate_degree",
    "got: training.enable_cpu_offload",
    "expected: bf16, micro-batch 2",
    "expected: fp32, micro-batch 4",
)


def fewer_steps(*ends: int) -> range:
    """Stand in for `range` in the example, of whose 30 steps it makes 20."""
    return range(1, 21) if ends == (1, 31) else range(*ends)


def everything(rank: int, of_plan: Plan, folder: Path) -> Any:
    """Return what was trained, what is refused and what the example prints."""
    seen = train(rank, of_plan, folder)
    printed = io.StringIO()
    stays = [mock.patch.object(dist, name) for name in ("init_process_group", "destroy_process_group")]
    if not THOROUGH:
        stays.append(mock.patch.object(example, "range", fewer_steps, create=True))
    with contextlib.redirect_stdout(printed), contextlib.ExitStack() as stack:
        for one in stays:
            stack.enter_context(one)
        example.main()
    return seen, refused(), printed.getvalue()


def test_torchtitans_trainer_trains_as_one_process_does(tmp_path: Path) -> None:
    wanted = reference()
    (seen, refusals, printed), other = run_ranks(everything, RANKS, plan(), tmp_path, timeout_s=200)
    compare(seen, wanted)
    assert other[0][0] == seen[0]
    for said in (refusals, other[1]):
        for text, part in zip(said, SAID, strict=True):
            assert part in text
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 0.5
    assert other[2] == ""


def shard_by_real_configuration(rank: int) -> tuple[str, int, int]:
    """Shard a model as torchtitan's trainer asks for it; return precision, micro-batch and accumulation."""
    import torchtitan.config as real
    from torchtitan.distributed.parallel_dims import ParallelDims

    degrees = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": RANKS}
    sizes = {"local_batch_size": BATCH, "global_batch_size": ACCUMULATION * BATCH * RANKS, "seq_len": LENGTH}
    function = parallelize({"optimizer": "adamw"})
    with torch.device("meta"):
        model = build()
    if hasattr(real, "JobConfig"):  # 0.2
        config = real.JobConfig()
        for name, value in sizes.items():
            setattr(config.training, name, value)
        made = function(model, ParallelDims(**degrees, etp=1), config)
    else:
        sections = {"training": real.TrainingConfig(**sizes), "parallelism": real.ParallelismConfig()}
        dims = ParallelDims(**degrees, spmd_backend=sections["parallelism"].spmd_backend)
        others = {"compile_config": real.CompileConfig(), "ac_config": None, "dump_folder": ""}
        made = function(model, parallel_dims=dims, **sections, **others)
    return made.plan.model.precision, made.plan.micro_batch, made.plan.accumulation


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan, which the tests do not ask for"
)
def test_the_real_configuration_is_read() -> None:
    wanted = "bf16", BATCH, ACCUMULATION  # bf16 is torchtitan's default
    assert run_ranks(shard_by_real_configuration, RANKS) == [wanted] * RANKS
