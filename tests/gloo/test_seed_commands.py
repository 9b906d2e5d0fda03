"""Every command of docs/from-the-seeds.md, run as it stands with options after it that make it small.

Unless thorough, of programs with several commands some, and the others' arguments.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import programs
import pytest
import torch
from checkouts import working_checkout
from thoroughness import THOROUGH
from torch import Tensor, nn

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-the-seeds.md").read_text()


def commands() -> Iterator[str]:
    """Yield the page's commands; a line that goes to a folder is for all that come after it in its block."""
    for block in re.findall(r"^```sh\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE):
        there = ""
        for line in block.splitlines():
            command = re.sub(r"\s+#.*", "", line)
            if command.startswith("cd "):
                there = f"{command}; "
            else:
                yield there + command


COMMANDS = tuple(commands())
TRAINED = {"examples/train_gpt2.py": 60, "examples/odc_fsdp1.py": 40, "examples/odc_fsdp2.py": 40}
"""Steps of the examples that are compared with one process in plain PyTorch; unless thorough, the first `FEWER` are."""
EVERY, FEWER = 20 if THOROUGH else 5, 10
"""How often their losses are printed; they take no option for either, so that unless thorough a copy is changed."""
LAYERS = 4 if THOROUGH else 2
"""Those of the first; the others have two."""
TUTORIAL, TUTORIAL_OF_TWO = (
    f"cd examples; export PYTHONPATH=.; torchrun {ranks}linear_example/train.py"
    for ranks in ("", "--nproc_per_node 2 ")
)
LINEAR = "--hidden 16 --steps 1 --warmup_steps 2"
PLAN = r"gpt2-1\.5b.*peak .* of 8\.00 GiB"
RUN = r"memory utilization: [\d.]+ MB / 512 MB \(measured.*overall system throughput: [\d.]+ seq/sec \(measured"
TINY = ("single", "ddp", "zero3")
"""Programs whose losses are those in docs/tiny-fsdp.md, which are plain PyTorch's (`test_tiny_examples.py`)."""
TRAINS = r" trains bert-tiny \(183,878 parameters\) on 4 ranks \(2 x 2\), cpu \(gloo\).*"
BERT = RUN + ".*masked tokens held out of training: .*next sentences held out of training: "
MEMORY = r"('log_key': 'memory'.*){%d}"

SMALL: dict[str, tuple[str, str]] = {
    "osdp plan --model gpt2-1.5b --mem 8GB": ("", PLAN),
    "osdp plan --model gpt2-1.5b --mem 8GB --pin 'blocks.*.mlp.up=split(4*shard)'": (
        "--batch 2",
        r"Block: mlp\.up +\d+ +split\(4\*shard\), pinned.*peak .* of 8\.00 GiB",
    ),
    "torchrun --nproc_per_node 4 examples/bert_auto_wrap.py --fsdp_args group_sharding": (
        "--steps 5 --trace traces/bert" if THOROUGH else "--steps 5",
        r"^step 5: loss 5\.\d+$",
    ),
    "torchrun --nproc_per_node 4 examples/bert_auto_wrap.py --fsdp_args communication_with_groups": (
        "--steps 5",
        r"^step 5: loss 5\.\d+$",
    ),
    "sh scripts/script_gpt2_training.sh": ("--steps 3", "^OSDP trains gpt2-tiny.*" + RUN),
    "sh scripts/script_gpt2_training.sh --fsdp_type FSDP": ("--steps 3", "^FSDP trains gpt2-tiny.*" + RUN),
    "sh scripts/script_bert_training.sh --fsdp_args group_sharding": (
        "--steps 3",
        "^FSDP with group_sharding" + TRAINS + "operators: group_shard:2 32;.*" + BERT,
    ),
    "sh scripts/script_bert_training.sh --fsdp_args communication_with_groups": (
        "--steps 3",
        "^FSDP with communication_with_groups" + TRAINS + "operators: hierarchical 32;.*" + BERT,
    ),
    "sh scripts/script_bert_training.sh --fsdp_args none": (
        "--steps 3",
        "^FSDP" + TRAINS + "operators: shard 32;.*" + BERT,
    ),
    "sh scripts/script_llm_odc_training.sh --packing kk --timeline steps.png": (
        "--model tiny --steps 3 --samples 4 --max-length 32",
        r"ODC .* times",
    ),
    "python examples/tiny/single.py": ("--steps 4 --trace traces/single", "^step 4: "),
    "torchrun --nproc_per_node=2 examples/tiny/ddp.py": ("--steps 4 --trace traces/ddp", "^step 4: "),
    "torchrun --nproc_per_node=2 examples/tiny/zero3.py --evenness-priority 0": (
        "--steps 4 --trace traces/zero3",
        r"cpu:1 keeps 0\.\d+ MiB; the fullest rank has 1\.0\d+",
    ),
    "torchrun --nproc_per_node=2 examples/tiny/fsdp.py --half --recompute": (
        "--steps 4 --trace traces/fsdp",
        r"^step 4: loss 5\.3",
    ),
    "osdp partition --model gpt2": ("", r"^ +2 +237\.4 MiB +1\.0032 \(1\)"),
    "osdp strategies --model gpt2 --cluster rtx4090-2": ("", r"shard +predicted +237\.4 MiB \(0\.50 P\)"),
    "osdp strategies --model gpt2 --seq 64 --measure": (
        "--model gpt2-tiny --seq 16 --strategy shard",
        r"shard +predicted.*(measured.*){2}",
    ),
    f"{TUTORIAL} --data_parallel ddp --batch_size 8192": (LINEAR, MEMORY % 3),
    f"{TUTORIAL} --data_parallel fsdp --batch_size 8192": (LINEAR, MEMORY % 3),
    f"{TUTORIAL} --data_parallel fsdp --batch_size 8192 --cpu_offload": (
        LINEAR,
        "warning: --cpu_offload has no effect on CPU",
    ),
    f"{TUTORIAL_OF_TWO} --data_parallel fsdp --batch_size 8192 --forward_prefetch --backward_prefetch BACKWARD_POST": (
        LINEAR,
        MEMORY % 6,
    ),
    f"{TUTORIAL_OF_TWO} --data_parallel fsdp --batch_size 8192 --auto_wrap_policy size_based --min_num_params 1000": (
        LINEAR,
        MEMORY % 6,
    ),
    f"{TUTORIAL_OF_TWO} --compare --batch_size 8192": (LINEAR, r"^ddp .*^fsdp .*^osdp "),
}
"""What is put after a command, and what it must say then."""
SHORTER = {
    "osdp plan --model gpt2-1.5b --mem 8GB": "--batch 2",
    "osdp plan --model gpt2-1.5b --mem 8GB --pin 'blocks.*.mlp.up=split(4*shard)'": "--model gpt2-tiny",
}
"""Further options unless thorough: tests/unit/test_cli.py bounds the memory of the first; one plans its model."""
ALIKE = (
    "torchrun --nproc_per_node 4 examples/bert_auto_wrap.py --fsdp_args communication_with_groups",
    "sh scripts/script_gpt2_training.sh --fsdp_type FSDP",
    "sh scripts/script_bert_training.sh --fsdp_args communication_with_groups",
    "sh scripts/script_bert_training.sh --fsdp_args none",
    "sh scripts/script_llm_odc_training.sh --packing kk --timeline steps.png",
    "torchrun --nproc_per_node=2 examples/tiny/ddp.py",
    "torchrun --nproc_per_node=2 examples/tiny/fsdp.py --half --recompute",
    f"{TUTORIAL} --data_parallel fsdp --batch_size 8192",
    f"{TUTORIAL_OF_TWO} --data_parallel fsdp --batch_size 8192 --forward_prefetch --backward_prefetch BACKWARD_POST",
    f"{TUTORIAL_OF_TWO} --data_parallel fsdp --batch_size 8192 --auto_wrap_policy size_based --min_num_params 1000",
    "osdp strategies --model gpt2 --seq 64 --measure",
    "torchrun --nproc_per_node 2 examples/odc_fsdp1.py",
)
"""Commands of programs that others run too.  Unless thorough, only their arguments are looked at: an option that
there is not is all that is wrong with them.  What they train is tested without the command, in test_fairscale.py,
test_train_runs.py, test_bert_training.py, test_llm_odc.py, test_tiny_examples.py, test_linear_example.py,
test_strategies_measured.py and test_odc_library.py."""
UNKNOWN, NO_SUCH = "--no-such-option", "(unrecognized arguments|No such option): --no-such-option"

# The first command of each program that torchrun starts: rank 0 is a process of its own, which no fork imports for.
# But for two that import less than their sibling zero3.py; unless thorough, the program that imports the most.
REAL = {
    command.partition(".py")[0].rpartition(" ")[2]: command
    for command in reversed(COMMANDS)
    if ("torchrun" in command if THOROUGH else "tiny/zero3" in command)
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = working_checkout(tmp_path_factory.mktemp("seeds"))
    for program, steps in TRAINED.items():
        text = (ROOT / program).read_text()
        changes = {f"range(1, {steps + 1})": f"range(1, {FEWER + 1})", "step % 20 ": f"step % {EVERY} "}
        changes |= {"layers=4": f"layers={LAYERS}"} if program == "examples/train_gpt2.py" else {}
        assert all(text.count(whole) == 1 for whole in changes)
        for whole, part in changes.items() if not THOROUGH else ():
            text = text.replace(whole, part)
        (made / program).write_text(text)
    return made


@cache
def told(checkout: Path, command: str, small: str) -> str:
    """Run a command as a shell does; return what it printed. It may say how far it is, and warn in OSDP's own words."""
    path = f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    small = small if THOROUGH else f"{small} {SHORTER.get(command, '')}"
    if command in REAL.values() and "tiny/ddp" not in command and "tiny/fsdp" not in command:
        environment[programs.REAL_RANK] = "0"
    done = subprocess.run(
        ["sh", "-c", f"{command} {small}"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300
    )
    if UNKNOWN in small:
        assert done.returncode != 0
        return done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith(("osdp: ", "warning: "))] == []
    return done.stdout + done.stderr


def is_run(command: str) -> bool:
    """Whether a command is run, or only its arguments are looked at."""
    return THOROUGH or command not in ALIKE


def program_of(command: str) -> str:
    """Return the last word of a command."""
    return shlex.split(command)[-1]


def test_the_page_has_these_commands_and_no_others() -> None:
    compared = [command for command in COMMANDS if program_of(command) in TRAINED]
    assert sorted(map(program_of, compared)) == sorted(TRAINED)
    assert [command for command in COMMANDS if command not in compared] == list(SMALL)


@pytest.mark.parametrize("command", SMALL)
def test_a_command_does_what_the_page_says(command: str, checkout: Path) -> None:
    small, said = SMALL[command] if is_run(command) else (f"{SMALL[command][0]} {UNKNOWN}", NO_SUCH)
    output = told(checkout, command, small)
    assert re.search(said, output, re.MULTILINE | re.DOTALL), output


def test_what_the_commands_leave(checkout: Path) -> None:
    """A timeline and traces where it was said, and TensorBoard's beside the linear example."""
    for command, (small, _) in SMALL.items():
        if is_run(command) and (folder := re.search(r"--trace (\S+)", small)):
            told(checkout, command, small)
            ranks = 1 if command.startswith("python") else int(command.partition("nproc_per_node")[2][1])
            names = {name for rank in range(ranks) for name in (f"memory-rank{rank}.png", f"trace-rank{rank}.json")}
            assert {path.name for path in (checkout / folder[1]).iterdir()} == names
    if THOROUGH:
        command = next(command for command in SMALL if "--timeline" in command)
        told(checkout, command, SMALL[command][0])
        assert (checkout / "steps.png").read_bytes().startswith(b"\x89PNG")
    command = next(command for command in SMALL if "--compare" in command)
    told(checkout, command, SMALL[command][0])
    traces = (checkout / "examples" / "profiles").glob("*/rank1.*.pt.trace.json")
    assert {trace.parent.name.partition("-")[0] for trace in traces} >= {"ddp", "fsdp", "osdp"}


@pytest.mark.parametrize("program", TINY if THOROUGH else ("single", "zero3"))
def test_the_small_programs_lose_what_their_page_says(program: str, checkout: Path) -> None:
    page = (ROOT / "docs" / "tiny-fsdp.md").read_text()
    command = next(command for command in SMALL if f"tiny/{program}.py" in command)
    shown, found = (
        [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", text, re.MULTILINE)]
        for text in (page, told(checkout, command, SMALL[command][0]))
    )
    assert len(shown) == 4
    assert found == pytest.approx(shown, abs=1e-4)


@pytest.mark.skipif(not THOROUGH, reason="of what test_fairscale.py compares with one process, with --thorough only")
def test_groups_change_no_loss(checkout: Path) -> None:
    outputs = [told(checkout, command, SMALL[command][0]) for command in SMALL if "bert_auto_wrap" in command]
    one, other = (float(re.findall(r"^step 5: loss (\S+)$", output, re.MULTILINE)[0]) for output in outputs)
    assert one == pytest.approx(other, abs=1.5e-3)  # three digits are printed


# ---- The examples that train what one process trains ---------------------------------------------


def reference(text: Tensor, layers: int, steps: int, micro_batches: Callable[[torch.Generator], int]) -> list[float]:
    """Train in plain PyTorch on the micro-batches of both ranks; return rank 0's last loss every few steps."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=layers, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    found = []
    for step in range(1, steps + 1):
        losses: list[list[Tensor]] = []
        for generator in generators:
            losses.append([])
            for _ in range(micro_batches(generator)):
                starts = torch.randint(len(text) - 64, (8,), generator=generator)
                tokens = torch.stack([text[start : start + 64] for start in starts])
                losses[-1].append(model(tokens, labels=tokens))
        torch.stack([loss for of_rank in losses for loss in of_rank]).mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            found.append(losses[0][-1].item())
    return found


@pytest.mark.parametrize("program", TRAINED)
def test_an_example_trains_what_one_process_trains(program: str, checkout: Path) -> None:
    command = next(command for command in COMMANDS if program_of(command) == program)
    if not is_run(command):
        assert re.search(NO_SUCH, told(checkout, command, UNKNOWN))
        return
    traces = THOROUGH or "odc" in program  # of OSDP's models the small programs leave some
    output = told(checkout, command, f"--trace traces/{Path(program).stem}" if traces else "")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]
    text = torch.tensor(list((checkout / program).read_bytes()))
    steps = TRAINED[program] if THOROUGH else FEWER
    if program == "examples/train_gpt2.py":
        wanted = reference(text, LAYERS, steps, lambda generator: 1)
    else:
        wanted = reference(text, 2, steps, lambda generator: int(torch.randint(1, 4, (), generator=generator)))
    assert losses == pytest.approx(wanted, abs=1e-3)  # of which the print rounds away half
    assert losses[-1] < losses[0]
    assert losses[-1] < (4.0 if THOROUGH else 4.5)  # of ln 256 = 5.5 at the start
    files = {path.name for path in (checkout / "traces" / Path(program).stem).iterdir()} if traces else set()
    assert not traces or files == {"memory-rank0.png", "memory-rank1.png", "trace-rank0.json", "trace-rank1.json"}


def test_the_readme_shows_the_file() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "train_gpt2.py").read_text() in blocks
