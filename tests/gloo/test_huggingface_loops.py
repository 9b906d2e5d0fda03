"""The Trainer of transformers, and accelerate's loop, on sharded models: as the same training by hand in a process."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples_path import EXAMPLES
from ranks import run_ranks
from torch import Tensor, nn
from toys import refusal
from trained_by_hand import MAX_NORM, RANKS, STEPS, adder_by_hand, decoder_by_hand, in_autocast_by_hand, next_token_loss

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
MIXED = {
    "transformers_trainer": ("*=shard", "model.layers.0=replicate", "model.layers.1=recompute", "lm_head=owner"),
    "accelerate_loop": ("*=shard", "blocks.0=replicate", "blocks.1=recompute", "head=owner"),
}
"""Plans by example: what is resumed at step 5 is sharded throughout."""


def forget_accelerate() -> None:
    """Let the next script begin as the first of its process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(example: str, *options: str) -> dict[str, Any]:
    """Run an example as it stands on this rank; return its names. The process group outlives it."""
    forget_accelerate()
    path = str(EXAMPLES / "integrations" / f"{example}.py")
    arguments = mock.patch.object(sys, "argv", [path, *options])
    with arguments, mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(path, run_name="__main__")


def trained(rank: int, example: str, folder: Path) -> dict[str, Any]:
    """Run an example, and again from its state at step 5; return what both tell, and what one process does."""
    output = ("--output", str(folder / example))
    whole = run(example, *output, "--pins", *MIXED[example])
    is_trainer = example == "transformers_trainer"
    checkpoint = str(folder / example / "checkpoint-5") if is_trainer else "5"
    resumed = run(example, *output, "--pins", "*=shard", "--resume", checkpoint, "--seed", "3")
    found: dict[str, Any] = {}
    for name, names in (("whole", whole), ("resumed", resumed)):
        parameters = names["model"].full_state_dict()
        if is_trainer:
            log = names["trainer"].state.log_history
            told = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
            evaluated = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
        else:
            told, evaluated = list(zip(names["losses"], names["norms"], strict=True)), names["evaluated"]
        found[name] = {"told": told, "evaluated": evaluated, "parameters": parameters}
    found["names"] = whole
    found["choices"], found["recomputed"] = whole["model"].plan.choices, whole["model"].plan.recomputed_blocks
    if rank == 0:
        by_hand = decoder_by_hand if is_trainer else adder_by_hand
        found["by_hand"] = by_hand(whole["build"], whole["samples"])
    return found


def arguments(folder: Path, **options: Any) -> Any:
    """Return arguments of a Trainer that prints nothing."""
    from transformers import TrainingArguments

    forget_accelerate()
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "train_sampling_strategy": "sequential"}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "logging_steps": 1}
    return TrainingArguments(str(folder), **quiet | sizes | {"lr_scheduler_type": "constant"} | options)


def best_of_three(rank: int, names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with smoothed labels and a user's metrics, and load the model of the highest loss; so too by hand."""
    from transformers import LlamaForCausalLM, TrainerCallback

    from osdp import OSDP
    from osdp.integrations.transformers import OsdpTrainer

    seen = []

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(type(model))

    def count(prediction: Any) -> dict[str, float]:
        return {"counted": float((prediction.label_ids != -100).sum()), "shown": float(len(prediction.predictions))}

    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    saves = {"save_steps": 1, "save_total_limit": 2, "metric_for_best_model": "eval_loss"}
    steps = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "label_smoothing_factor": 0.1}
    data, held_out, pins = names["samples"](12), names["samples"](8), list(MIXED["transformers_trainer"])
    told = {"pins": pins, "micro_batch": 2}
    trainer = OsdpTrainer(
        OSDP(names["build"](), told, example_inputs=names["example_inputs"]),
        arguments(folder, **evaluates, **saves, **steps),
        train_dataset=data,
        eval_dataset=held_out,
        compute_metrics=count,
        callbacks=[Callback()],
    )
    trainer.train()
    assert seen == [OSDP] * 3
    trainer.save_model(str(folder / "saved"))
    state = trainer.model.full_state_dict()
    log = trainer.state.log_history
    found = {"log": log, "state": state, "kept": sorted(path.name for path in folder.glob("checkpoint-*"))}
    if rank == 0:
        read, loading = LlamaForCausalLM.from_pretrained(folder / "saved", output_loading_info=True)
        assert not any(loading.values()), loading
        assert read.config.architectures == ["LlamaForCausalLM"]
        torch.testing.assert_close(dict(read.state_dict()), state, rtol=0, atol=0)
        found["losses"], found["norms"], found["evaluated"], states = [], [], [], []
        model = names["build"]()
        for step in range(3):
            loss = next_token_loss(model, data[4 * step : 4 * step + 4], smoothing=0.1)
            loss.backward()  # type: ignore[no-untyped-call]
            found["losses"].append(loss.item())
            found["norms"].append(nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(0.5 * one.grad)
                    one.grad = None
                parts = [next_token_loss(model, held_out[start : start + 4], smoothing=0.1) for start in (0, 4)]
            found["evaluated"].append(torch.stack(parts).mean().item())
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        found["best"] = max(range(3), key=lambda step: found["evaluated"][step])
        found["wanted"] = states[found["best"]]
        found["counted"] = float(sum((one["labels"] != -100).sum() for one in held_out))
    return found


def own_loss(rank: int, names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a module that is not of transformers, by a loss of the user's, with late gradients; so too by hand."""
    from osdp import OSDP
    from osdp.integrations.transformers import OsdpTrainer

    class Mine(OsdpTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(2 * outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    args = arguments(folder, max_steps=3, gradient_accumulation_steps=2, save_strategy="no")
    fused = torch.optim.AdamW, {"lr": 1e-2, "fused": True}
    told = {"pins": ["*=odc:2", "blocks.0=replicate", "head=owner"], "micro_batch": 2}
    data, model = names["samples"](24, 3), OSDP(names["build"](), told)
    trainer = Mine(model, args, train_dataset=data, optimizer_cls_and_kwargs=fused)
    trainer.train()
    found = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "wanted": []}
    if rank == 0:
        alone = names["build"]()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.0)
        for step in range(3):
            digits, labels = (torch.stack([one[key] for one in data[8 * step : 8 * step + 8]]) for key in data[0])
            loss = nn.functional.cross_entropy(2 * alone(digits, labels)["logits"], labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(alone.parameters(), 1.0)  # as a Trainer does unless it is told otherwise
            optimizer.step()
            optimizer.zero_grad()
            found["wanted"].append(loss.item())
    return found


def adapters(rank: int, names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train adapters in bf16 in one go, and from step 2 again with other initial values; return both ends."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from osdp import OSDP
    from osdp.integrations.transformers import OsdpTrainer

    def build(seed: int) -> Any:
        base = names["build"]().to(torch.bfloat16)
        torch.manual_seed(seed)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    ends, logs = [], []
    for seed, pins, resume in ((1, ["*=shard", "*.layers.0=replicate"], None), (2, ["*=shard"], "checkpoint-2")):
        told = {"precision": "bf16", "micro_batch": 2, "pins": pins}
        model = OSDP(build(seed), told, example_inputs=names["example_inputs"])
        args = arguments(folder, bf16=True, max_steps=4, save_steps=2, learning_rate=1e-2)
        trainer = OsdpTrainer(model, args, train_dataset=names["samples"](16), compute_loss_func=mean_loss)
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
        ends.append({name: one for name, one in model.full_state_dict().items() if "lora" in name})
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    tokens = trainer._get_num_items_in_batch([{"labels": torch.ones(2, 600, dtype=torch.int64)}], torch.device("cpu"))
    assert (tokens.dtype, tokens.item()) == (torch.int64, 2 * 2 * 599)
    if rank == 0:
        read = PeftModel.from_pretrained(names["build"]().to(torch.bfloat16), folder / "checkpoint-4").state_dict()
        for name, one in ends[1].items():
            torch.testing.assert_close(read[name], one, rtol=0, atol=0)
        assert not (folder / "checkpoint-4" / "model.safetensors").exists()
        manifest = (folder / "checkpoint-4" / "osdp" / "manifest.json").read_text()
        assert "lora_A" in manifest
        assert "embed_tokens" not in manifest
    with torch.no_grad():
        first = next_token_loss(build(1), names["samples"](4)).item()
    return {"ends": ends, "logs": logs, "first": first}


def in_autocast(rank: int, names: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Train in bf16 by plans whose forward runs under autocast, by both loops; return the ends, and those by hand."""
    from osdp import OSDP
    from osdp.integrations.accelerate import OsdpAccelerator
    from osdp.integrations.transformers import OsdpTrainer

    told = {"precision": "amp-bf16", "micro_batch": 2, "optimizer": "sgd", "pins": MIXED["accelerate_loop"]}
    adder, decoder = names["accelerate_loop"], names["transformers_trainer"]
    forget_accelerate()
    accelerator = OsdpAccelerator(cpu=True, mixed_precision="bf16")
    data = adder["samples"](4 * RANKS, 7)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model = OSDP(adder["build"](), told)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    found = {"accelerate": (model.full_state_dict(), in_autocast_by_hand(adder["build"](), data, 0.5))}

    told |= {"pins": MIXED["transformers_trainer"]}
    model = OSDP(decoder["build"](), told, example_inputs=decoder["example_inputs"])
    options = {"max_steps": 4, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0, "bf16": True}
    OsdpTrainer(model, arguments(folder, **options), train_dataset=decoder["samples"](16)).train()
    found["transformers"] = (
        model.full_state_dict(),
        in_autocast_by_hand(decoder["build"](), decoder["samples"](16), 0.5),
    )
    return found


def trainer_refusals(names: dict[str, Any], folder: Path) -> list[str]:
    """Return what a Trainer says of what cannot work."""
    from transformers import Trainer

    from osdp import OSDP
    from osdp.integrations.transformers import OsdpTrainer

    model = OSDP(names["build"](), {"pins": ["*=shard"], "micro_batch": 2}, example_inputs=names["example_inputs"])
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    given: list[dict[str, Any]] = [
        {"activation_checkpointing": True},
        {"auto_find_batch_size": True},
        {"bf16_full_eval": True},
        {"save_on_each_node": True},
        {"bf16": True},
        {"save_only_model": True, **best},
    ]
    said = [refusal(lambda: OsdpTrainer(model, arguments(folder, **options))) for options in given]  # noqa: B023

    class Referring(Trainer):  # type: ignore[misc]
        """Takes a reference model before its arguments, as trainers of trl do."""

        def __init__(self, model: Any, reference: Any = None, args: Any = None, **options: Any) -> None:
            super().__init__(model, args, **options)
            self.reference = reference

    joined: Any = type("Joined", (OsdpTrainer, Referring), {})
    trainer = joined(model, args=arguments(folder, max_steps=7), reference="theirs")
    assert (trainer.args.max_steps, trainer.reference, trainer.model) == (7, "theirs", model)
    said.append(refusal(lambda: OsdpTrainer(names["build"](), arguments(folder))))
    (folder / "checkpoint-1").mkdir(parents=True, exist_ok=True)
    resumed = OsdpTrainer(model, arguments(folder, max_steps=1), train_dataset=names["samples"](4))
    return [*said, refusal(lambda: resumed.train(resume_from_checkpoint=True))]


def accelerate_details(rank: int, names: dict[str, Any], folder: Path) -> list[str]:
    """Use what else an accelerator has, and return what it says of what cannot work."""
    import accelerate

    from osdp import OSDP
    from osdp.integrations.accelerate import OsdpAccelerator

    forget_accelerate()
    accelerator = OsdpAccelerator(cpu=True)
    told = {"pins": [*MIXED["accelerate_loop"], "blocks.2=odc:2"], "micro_batch": 2}
    model = OSDP(names["build"](), told)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert accelerator.prepare(model) is accelerator.prepare(model) is model
    wrapped = accelerator.prepare(optimizer)
    assert accelerator._models == [model]
    assert accelerator.unwrap_model(model) is model
    initial = accelerator.get_state_dict(model)
    assert bool(initial) == (rank == 0)

    data, alone = names["samples"](4, 7), names["build"]()
    batch = {key: torch.stack([one[key] for one in data[2 * rank : 2 * rank + 2]]) for key in ("digits", "labels")}
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        wrapped.step()
    whole = {key: torch.stack([one[key] for one in data]) for key in ("digits", "labels")}
    alone(**whole)["loss"].backward()
    wanted = {name: one.detach() - one.grad.clamp(-0.01, 0.01) for name, one in alone.named_parameters()}
    if rank == 0:
        torch.testing.assert_close(initial, dict(alone.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(model.full_state_dict(rank0_only=False), wanted)
    frozen_out = [one for name, one in model.named_parameters() if name.startswith("blocks")]
    norm = accelerator.clip_grad_norm_(frozen_out, 1.0)
    expected = [one.grad.clamp(-0.01, 0.01) for name, one in alone.named_parameters() if name.startswith("blocks")]
    torch.testing.assert_close(norm, nn.utils.get_total_norm(expected))

    unprepared = OsdpAccelerator(cpu=True)
    unprepared.prepare(optimizer)
    said = [refusal(lambda: unprepared.save_state(str(folder / "unprepared")))]
    said += [refusal(lambda: accelerate.Accelerator(cpu=True).prepare(OSDP(names["build"](), model.plan)))]
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    said.append(refusal(lambda: accelerator.save_state(str(folder / "two"))))
    for options in ({"cpu": True, "mixed_precision": "bf16"}, {"cpu": True, "dynamo_backend": "inductor"}, {}):
        forget_accelerate()
        said.append(refusal(lambda: OsdpAccelerator(**options).prepare(model)))  # noqa: B023
    forget_accelerate()
    with mock.patch.dict("os.environ", ACCELERATE_USE_FSDP="true"):  # as accelerate launch says it
        said.append(refusal(lambda: OsdpAccelerator(cpu=True).prepare(model)))
    forget_accelerate()
    return said


def documented(names: dict[str, dict[str, Any]], folder: Path) -> list[list[str]]:
    """Run what the page shows, as it stands; return the files that each leaves."""
    from transformers import TrainingArguments

    from osdp import OSDP

    sections = dict(re.findall(r"^## (\w+)\n+```python\n(.*?)```", PAGE.read_text(), re.M | re.S))
    left = []
    for name, example in zip(("transformers", "accelerate"), MIXED, strict=True):
        forget_accelerate()
        there, known = folder / name, names[example]
        there.mkdir(parents=True, exist_ok=True)
        data = known["samples"](*(16, 1)[: 1 + (name == "accelerate")])
        given = {"model": known["build"](), "description": {"micro_batch": 2}, "dataset": data}
        given |= {"loader": torch.utils.data.DataLoader(data, batch_size=2), "torch": torch}
        if name == "transformers":
            given["OSDP"] = partial(OSDP, example_inputs=known["example_inputs"])
        keeps_group = mock.patch.object(dist, "destroy_process_group")
        with keeps_group, contextlib.chdir(there), contextlib.redirect_stdout(io.StringIO()):
            exec(sections[name], {"OSDP": OSDP, "TrainingArguments": TrainingArguments} | given)
        dist.barrier()
        left.append(sorted(str(path.relative_to(there)) for path in there.rglob("*")))
    return left


def loops(rank: int, folder: Path) -> dict[str, Any]:
    """Return what all of the following tests look at: a rank imports transformers once, and has one process group."""
    found: dict[str, Any] = {example: trained(rank, example, folder) for example in MIXED}
    names = {example: found[example].pop("names") for example in MIXED}
    decoder, adder = names["transformers_trainer"], names["accelerate_loop"]
    found["best"] = best_of_three(rank, decoder, folder / "best")
    found["own"] = own_loss(rank, adder, folder / "own")
    found["adapters"] = adapters(rank, decoder, folder / "adapters")
    found["autocast"] = in_autocast(rank, names, folder / "autocast")
    found["documented"] = documented(names, folder)
    found["refusals"] = trainer_refusals(decoder, folder / "refused"), accelerate_details(rank, adder, folder)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("loops")
    found: list[dict[str, Any]] = run_ranks(loops, RANKS, folder, joins=False, timeout_s=240)
    return found


@pytest.mark.parametrize("example", MIXED)
def test_a_loop_trains_as_one_process_does_and_resumes_under_another_plan(
    example: str, told: list[dict[str, Any]]
) -> None:
    found = told[0][example]
    assert set(found["choices"].values()) == {"shard", "replicate", "owner"}
    assert len(found["recomputed"]) == 1
    wanted = found["by_hand"]
    assert len(found["whole"]["told"]) == STEPS
    assert found["whole"]["evaluated"] == pytest.approx(wanted["evaluated"], abs=2e-5)
    assert max(norm for _, norm in wanted["told"]) > MAX_NORM, "it clips"
    for name, steps in (("whole", STEPS), ("resumed", 5)):
        torch.testing.assert_close(found[name]["told"][-steps:], wanted["told"][-steps:], rtol=2e-5, atol=2e-5)
        assert found[name]["evaluated"][STEPS] == pytest.approx(wanted["evaluated"][STEPS], abs=2e-5)
        torch.testing.assert_close(found[name]["parameters"], dict(wanted["parameters"]), rtol=1e-4, atol=2e-5)


def test_the_best_model_is_loaded_and_labels_are_smoothed_by_next_tokens(told: list[dict[str, Any]]) -> None:
    found = told[0]["best"]
    log = found["log"]
    torch.testing.assert_close([one["loss"] for one in log if "loss" in one], found["losses"], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close([one["grad_norm"] for one in log if "loss" in one], found["norms"], rtol=1e-4, atol=1e-5)
    evaluations = [one for one in log if "eval_loss" in one]
    torch.testing.assert_close([one["eval_loss"] for one in evaluations], found["evaluated"], rtol=2e-5, atol=2e-5)
    assert [(one["eval_counted"], one["eval_shown"]) for one in evaluations] == [(found["counted"], 8.0)] * 3
    torch.testing.assert_close(found["state"], found["wanted"], rtol=1e-4, atol=2e-5)
    assert found["best"] < 2, "the last is not the best"
    assert found["kept"] == sorted({f"checkpoint-{found['best'] + 1}", "checkpoint-3"})


def test_a_loss_of_the_users_trains_any_module(told: list[dict[str, Any]]) -> None:
    found = told[0]["own"]
    torch.testing.assert_close(found["losses"], found["wanted"], rtol=2e-5, atol=2e-5)


def test_adapters_resume_from_a_checkpoint_of_what_is_trained_alone(told: list[dict[str, Any]]) -> None:
    found = told[0]["adapters"]
    whole, resumed = found["ends"]
    torch.testing.assert_close(resumed, whole, rtol=1e-3, atol=1e-4)
    assert found["logs"][1] == pytest.approx(found["logs"][0], abs=5e-3)
    assert len(found["logs"][0]) == 4
    assert found["logs"][0][0] == pytest.approx(found["first"], rel=5e-3)


@pytest.mark.parametrize("loop", ["accelerate", "transformers"])
def test_plans_with_autocast_train_as_one_process_with_autocast(loop: str, told: list[dict[str, Any]]) -> None:
    """Within 0.2 % of how far training moves them; without autocast they end farther away, so that it is seen."""
    found, (start, wanted, in_fp32) = told[0]["autocast"][loop]
    seen = 0.0
    for name, one in found.items():
        moved = max(1e-3, float((wanted[name] - start[name]).abs().max()))
        assert float((one - wanted[name]).abs().max()) < 2e-3 * moved, name
        seen = max(seen, float((in_fp32[name] - wanted[name]).abs().max()) / moved)
    assert seen > 5e-3


def test_the_page_shows_what_runs(told: list[dict[str, Any]]) -> None:
    trainer, accelerate = told[0]["documented"]
    for path in ("finished/model.safetensors", "trained/checkpoint-2/osdp", "trained/checkpoint-4/model.safetensors"):
        assert path in trainer
    assert "state/osdp_0/manifest.json" in accelerate


def test_what_cannot_work_is_refused(told: list[dict[str, Any]]) -> None:
    for rank in told:
        trainer, accelerator = rank["refusals"]
        names = ("activation_checkpointing", "auto_find_batch_size", "bf16_full_eval", "save_on_each_node")
        expected = [f"{name} does not work with a model that OSDP has sharded" for name in names]
        expected += ["accelerate is asked for another precision than the plan's"]
        expected += ["the best model cannot be loaded from what save_only_model saves"]
        expected += ["OsdpTrainer trains a model that OSDP has sharded"]
        *first, last = (message.splitlines()[0] for message in trainer)
        assert first == expected
        assert last.endswith("checkpoint-1 is no checkpoint of OsdpTrainer")
        assert [message.splitlines()[0] for message in accelerator] == [
            "SGD has sharded parameters of a model that was not prepared",
            "DistributedDataParallel cannot wrap a model that OSDP has sharded",
            "a sharded model is saved with one optimizer",
            "accelerate is asked for another precision than the plan's",
            "accelerate cannot compile a model that OSDP has sharded",
            "accelerate does not see the ranks of the model",
            "accelerate cannot shard a model that OSDP has sharded",
        ]
        assert all("  try: " in message for message in (*trainer, *accelerator))
