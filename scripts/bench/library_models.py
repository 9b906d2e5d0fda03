"""Is the memory of other libraries' models predicted?  `python scripts/bench/library_models.py timm --count 20`

Draws models of timm, torchvision or x-transformers (which have to be installed), and for each two plans: mixtures of
up to three strategies, with blocks kept, recomputed, or recomputed in part or selectively, in fp32 or bf16.  Prints how
far the predicted peak is from that of a dry run of the runtime on fake tensors.  `--seed` draws others; `--models`
takes names in place of drawn ones.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import _shared as bench

sys.path.insert(0, str(bench.ROOT / "tests"))
os.environ["OSDP_TEST_THOROUGH"] = "1"  # on fake tensors
STRATEGIES = ("shard", "shard_grad", "group_shard:2", "secondary_shard:2", "replicate", "owner", "shard+offload")
Build, Inputs = Callable[[str], Any], Callable[[str, int], Any]
Library = tuple[list[str], Build, Inputs]
"""Names of models, what builds one, and what makes its inputs for a micro-batch."""
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "rms norm, gated": {"use_rmsnorm": True, "ff_glu": True},
    "relative positions": {"rel_pos_bias": True},
    "macaron": {"macaron": True},
    "normed queries": {"attn_qk_norm": True},
    "talking heads": {"attn_pre_talking_heads": True},
    "flash": {"attn_flash": True},
    "one key head": {"attn_one_kv_head": True},
    "gated residuals": {"gate_residual": True},
    "memory": {"attn_num_mem_kv": 4},
    "shifted tokens": {"shift_tokens": 1},
    "several streams": {"num_residual_streams": 4},
    "norms around": {"sandwich_norm": True},
    "value residuals": {"add_value_residual": True},
    "layers put together": {"integrate_layers": True},
    "tied layers": {"weight_tie_layers": True},
}
"""Options of a decoder of x-transformers."""


def main() -> None:
    """Draw models, compare, and print a line for each plan and a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=list(LIBRARIES))
    parser.add_argument("--count", type=int, default=20, help="how many models are drawn")
    parser.add_argument("--models", nargs="*", help="names, in place of drawn ones")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    names, build, inputs = LIBRARIES[options.library]()
    names = options.models or Random(options.seed).sample(names, min(options.count, len(names)))
    errors = [error for name in names for error in compared(name, build, inputs, Random(f"{name} {options.seed}"))]
    print(f"{bench.machine()}, {options.library}, seed {options.seed}")
    if errors:
        print(f"{len(errors)} plans: from {min(errors):+.3%} to {max(errors):+.3%}")


def compared(name: str, build: Build, inputs: Inputs, draw: Random) -> Iterator[float]:
    """Yield the relative errors of two plans for a model; say what cannot be traced or run."""
    from rehearsals import compare, plan_of
    from synthetic import cluster

    from osdp.models.user_factory import source_of
    from planner.model.fsdp_units import can_hold
    from planner.strategies.registry import known_strategies
    from profiler.errors import OsdpError
    from profiler.trace.trace import trace_model

    source = source_of(lambda: build(name), name, None, lambda batch: inputs(name, batch))
    precision = draw.choice(("fp32", "bf16"))
    try:
        graph = trace_model(source, precision)
    except OsdpError as error:
        print(f"{name} ({precision}): {error}", flush=True)
        return
    for _ in range(2):
        machine, started = cluster(*draw.choice(((2, 2), (1, 4)))), time.perf_counter()
        known = {str(one): one for one in known_strategies(machine)}
        drawn = [draw.choice(STRATEGIES) for _ in range(draw.choice((1, 2, 3)))]
        wanted = [(one, draw.choice(drawn)) for one in graph.operators]
        choices = {one.name: which if can_hold(one, known[which]) else "replicate" for one, which in wanted}
        how, blocks = draw.choice(("kept", "all", "some", "selective")), [block.name for block in graph.blocks]
        again = blocks if how == "all" else [one for one in blocks if how == "some" and draw.random() < 0.5]
        selective = [block.name for block in graph.blocks if how == "selective" and block.selective_rerun]
        batch, accumulation = draw.choice((2, 3)), draw.choice((1, 1, 2))
        plan = plan_of(graph, machine, choices, again, selective, micro_batch=batch, accumulation=accumulation)
        try:
            found = compare(plan, source, graph, machine, with_data=False)
        except Exception as error:
            print(f"{name} ({precision}): {type(error).__name__}: {error}", flush=True)
            continue
        size = sum(found.tracked.values()) / bench.MIB
        took = f"{time.perf_counter() - started:.0f} s"
        print(f"{name:38} {precision} {batch} x {accumulation} {how:9} {', '.join(sorted({*choices.values()})):50}"
              f" {size:7.1f} MiB {found.error:+.3%} {took}", flush=True)  # fmt: skip
        yield found.error


# --- libraries --------------------------------------------------------------------------------


def with_loss(module: Any) -> Any:
    """Return a module whose loss is the sum of the mean squares of all outputs."""
    from torch import Tensor, nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *inputs: Tensor) -> Tensor:
            out = self.inner(*inputs)
            parts: Iterable[Any] = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
            losses = [one.float().pow(2).mean() for one in parts if isinstance(one, Tensor)]
            return sum(losses[1:], losses[0])

    return WithLoss()


def images(batch: int, side: int, channels: int = 3) -> Any:
    """Return images (batch, channels, side, side)."""
    import torch

    return torch.randn(batch, channels, side, side)


def timm() -> Library:
    """Return all architectures of timm at the size of their inputs."""
    import timm as library

    def build(name: str) -> Any:
        return with_loss(library.create_model(name, pretrained=False, num_classes=16))

    def inputs(name: str, batch: int) -> Any:
        channels, side, _ = library.get_pretrained_cfg(name).input_size
        return images(batch, side, channels)

    return library.list_models(), build, inputs


def torchvision() -> Library:
    """Return the classifiers of torchvision, at 224 pixels (Inception: 299)."""
    from torchvision import models

    def build(name: str) -> Any:
        some = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return with_loss(models.get_model(name, weights=None, num_classes=16, **some))

    return models.list_models(module=models), build, lambda name, batch: images(batch, SIDES.get(name, 224))


def x_transformers() -> Library:
    """Return decoders of three layers."""
    import torch
    import x_transformers as library

    def build(name: str) -> Any:
        layers = library.Decoder(dim=64, depth=3, heads=4, attn_dim_head=16, **DECODERS[name])
        return with_loss(library.TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers))

    return list(DECODERS), build, lambda _, batch: torch.randint(256, (batch, 64))


SIDES = {"inception_v3": 299}
LIBRARIES = {"timm": timm, "torchvision": torchvision, "x-transformers": x_transformers}


if __name__ == "__main__":
    main()
