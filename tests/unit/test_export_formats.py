"""What plans are exported to, as the libraries themselves read it, or where they are not there, as they document it."""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from command_line import Cli
from parity import Case, cluster_of, graph_of
from torch.distributed.fsdp import CPUOffloadPolicy

from osdp.export.formats import FORMATS, exported
from planner.analysis.explain import OpenPlan, open_plan
from profiler.errors import OsdpError

BLOCKS = tuple(block.name for block in graph_of("gpt2").blocks)
CLASS = graph_of("gpt2").blocks[0].kind
OTHERS = ("transformers", "accelerate", "deepspeed", "torchtitan")


def view_of(default: str, again: str = "", precision: str = "bf16", choices: Any = None) -> OpenPlan:
    """Return a plan of gpt2 on 2 x 2 ranks; `again`: how all blocks are recomputed."""
    case = Case(
        "gpt2",
        choices or {},
        default,
        BLOCKS if again == "whole" else (),
        precision,
        accumulation=3,
        selective=BLOCKS if again == "selective" else (),
    )
    return open_plan(case.plan(), graph_of("gpt2", precision), cluster_of(2, 2))


def text_of(name: str, default: str, again: str = "", **others: Any) -> str:
    return exported(view_of(default, again, **others), name, nearest=False).text


def launched(tmp_path: Path, text: str) -> dict[str, str]:
    """Return the environment that `accelerate launch` gives its processes."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    (tmp_path / "config.yaml").write_text(text)
    with patch.dict(os.environ):
        arguments = ["--config_file", str(tmp_path / "config.yaml"), "train.py"]
        args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
        assert (args.num_machines, args.num_processes, args.mixed_precision) == (2, 4, "bf16")
        return prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    ("strategy", "again", "reshards", "recomputes", "offloads"),
    [
        ("shard", "whole", True, True, False),
        ("shard_grad", "", False, False, False),
        ("shard+offload", "", True, False, True),
        ("group_shard:2", "whole", True, True, False),
    ],
)
def test_accelerate_reads_its_file(
    strategy: str, again: str, reshards: bool, recomputes: bool, offloads: bool, tmp_path: Path
) -> None:
    environment = launched(tmp_path, text_of("accelerate", strategy, again))
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    with patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
        parallelism = ParallelismConfig() if "group" in strategy else None
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16  # as the file warns
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshards
    assert plugin.activation_checkpointing is recomputes
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is offloads
    assert plugin.transformer_cls_names_to_wrap == [CLASS]
    if parallelism is not None:
        assert (parallelism.dp_replicate_size, parallelism.dp_shard_size) == (2, 2)


def test_accelerate_replicates_without_fsdp() -> None:
    config = yaml.safe_load(text_of("accelerate", "replicate", precision="fp32"))
    assert (config["distributed_type"], config["mixed_precision"]) == ("MULTI_CPU", "no")
    assert "fsdp_config" not in config


@pytest.mark.parametrize(("strategy", "again"), [("shard", "whole"), ("shard_grad", ""), ("shard+offload", "")])
def test_transformers_reads_its_file(strategy: str, again: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "fsdp.json").write_text(text_of("transformers", strategy, again))
    with patch.dict(os.environ):
        arguments = transformers.TrainingArguments(
            str(tmp_path), fsdp=True, fsdp_config=str(tmp_path / "fsdp.json"), use_cpu=True
        )
    read = arguments._process_fsdp_args()
    assert read["fsdp_version"] == 2
    assert read["reshard_after_forward"] is (strategy != "shard_grad")
    assert read["activation_checkpointing"] is (again == "whole")
    assert read.get("cpu_offload", False) is ("offload" in strategy)
    assert read["transformer_cls_names_to_wrap"] == CLASS


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ("replicate", {"stage": 0}),
        ("shard_grad", {"stage": 2}),
        ("shard", {"stage": 3}),
        ("group_shard:2", {"stage": 3, "mics_shard_size": 2}),
        ("secondary_shard:2", {"stage": 3, "zero_hpz_partition_size": 2}),
    ],
)
def test_deepspeed_gets_the_stage_that_its_documentation_names(strategy: str, zero: dict[str, int]) -> None:
    assert json.loads(text_of("deepspeed", strategy)) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def test_deepspeed_says_what_stage_2_costs() -> None:
    view = view_of("shard_grad", "whole")
    numel = sum(parameter.numel for operator in graph_of("gpt2").operators for parameter in operator.parameters)
    remarks = "\n".join(exported(view, "deepspeed", nearest=False).remarks)
    assert f"{numel * 2 * 3 / 4 / 2**20:.1f} MiB more at rest" in remarks
    assert "Recompute all blocks in the model" in remarks


@pytest.mark.parametrize(
    ("strategy", "degrees", "policy"),
    [
        ("replicate", (4, 1), "always"),
        ("shard", (1, 4), "always"),
        ("shard_grad", (1, 4), "never"),
        ("group_shard:2", (2, 2), "always"),
    ],
)
@pytest.mark.parametrize(("again", "mode"), [("", "none"), ("whole", "full"), ("selective", "selective")])
def test_torchtitan_gets_its_sections(
    strategy: str, degrees: tuple[int, int], policy: str, again: str, mode: str
) -> None:
    config = tomllib.loads(text_of("torchtitan", strategy, again))
    parallelism, training = config["parallelism"], config["training"]
    assert (parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]) == degrees
    assert parallelism["fsdp_reshard_after_forward"] == policy
    assert (training["local_batch_size"], training["global_batch_size"]) == (2, 2 * 3 * 4)
    assert training["mixed_precision_param"] == "bfloat16"
    assert config["activation_checkpoint"]["mode"] == mode


@pytest.mark.parametrize("name", OTHERS)
def test_a_mixed_plan_is_refused_or_takes_what_most_parameters_have(name: str) -> None:
    sizes = Counter({operator.name: operator.numel for operator in graph_of("gpt2").operators})
    (largest, size), total = sizes.most_common(1)[0], sizes.total()
    assert size < total / 2
    view = view_of("shard_grad", choices={largest: "owner"})
    with pytest.raises(OsdpError, match="owner") as refusal:
        exported(view, name, nearest=False)
    assert largest in refusal.value.got
    made = exported(view, name, nearest=True)
    said = "\n".join([made.text, *made.remarks])
    assert f"owner -> shard_grad ({largest})" in said
    # Priced as a plan that says so from the start.
    assert f"{view_of('shard_grad').prediction.step_time_s:.4g} s a step" in said
    assert f"{view.prediction.step_time_s:.4g} s a step" in said


@pytest.mark.parametrize("name", OTHERS)
def test_recomputation_of_some_blocks_is_refused_or_becomes_that_of_most(name: str) -> None:
    case = Case("gpt2", {}, "shard", BLOCKS[:1], "fp32")
    view = open_plan(case.plan(), graph_of("gpt2"), cluster_of(2, 2))
    with pytest.raises(OsdpError, match=BLOCKS[1]):
        exported(view, name, nearest=False)
    made = exported(view, name, nearest=True)
    # One of two blocks: the kind that needs less memory.
    assert f"no recomputation -> recomputation ({BLOCKS[1]})" in "\n".join([made.text, *made.remarks])


def test_json_stays_clean_and_remarks_go_to_standard_error(cli: Cli) -> None:
    cli.done(
        "plan",
        "--model",
        "gpt2-tiny",
        "--cluster",
        "titan-rtx-8",
        "--batch",
        "2",
        "--pin",
        "*=shard",
        "-o",
        "plan.yaml",
    )
    done = cli("export", "plan.yaml", "--to", "deepspeed", "--nearest")
    assert done.status == 0
    assert json.loads(done.out)["zero_optimization"] == {"stage": 3}
    assert "Predicted, not measured" in done.err


@pytest.mark.parametrize(("default", "nearest"), [("shard_grad", "shard_grad"), ("replicate", "shard")])
def test_the_nearest_needs_no_more_than_the_limit_if_one_of_them_does(default: str, nearest: str) -> None:
    last = graph_of("gpt2").operators[-1].name
    view = view_of(default, precision="fp32", choices={last: "owner"})
    wanted = view_of(nearest, "whole" if default == "shard_grad" else "", precision="fp32").prediction
    assert wanted.peak_memory_bytes < view_of(default, precision="fp32").prediction.peak_memory_bytes
    view = replace(view, plan=replace(view.plan, limit_bytes=wanted.peak_memory_bytes))
    said = exported(view, "torchtitan", nearest=True).text
    assert "does NOT fit" not in said
    assert f"owner -> {nearest} ({last})" in said
    tight = replace(view, plan=replace(view.plan, limit_bytes=1))
    assert "does NOT fit" in exported(tight, "torchtitan", nearest=True).text


def test_plans_with_autocast_are_refused(cli: Cli) -> None:
    cli.done("plan", "--model", "gpt2-tiny", "--cluster", "h100-8", "--precision", "amp-bf16", "-o", "plan.yaml")
    for name in FORMATS:
        done = cli("export", "plan.yaml", "--to", name)
        assert (done.status, done.out) == (2, "")
        assert "under autocast is not exported" in done.err
