"""Autocast for tensors without data, against PyTorch's own on the CPU and against the lists of its headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsals import plan_of
from synthetic import cluster
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp.autocast_room import refuse_fp16
from osdp.cli.reports.figures import rates
from osdp.zoo import load_cluster
from planner.plan import model_ref
from profiler import autocast
from profiler.autocast import Autocast
from profiler.errors import OsdpError
from profiler.mixed_precision import autocast_forwards
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


class Ops(TorchDispatchMode):
    """Notes ops below autocast and autograd, with the dtypes that they take and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = list[tuple[str, list[torch.dtype], list[torch.dtype]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.seen.append((str(func), dtypes_in((args, kwargs)), dtypes_in(out)))
        return out


def dtypes_in(tree: Any) -> list[torch.dtype]:
    return [one.dtype for one in tree_leaves(tree) if isinstance(one, Tensor)]


def rows(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.rand(shape).to(dtype).requires_grad_(grad)


LAYERS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: functional.linear(rows(2, 3, 4), rows(5, 4), rows(5)),
    "linear of a table": lambda: functional.linear(
        functional.embedding(torch.zeros(2, 3, dtype=torch.int64), rows(7, 4)), rows(5, 4)
    ),
    "matmul": lambda: rows(2, 3, 4) @ rows(4, 5),
    "of fp64": lambda: rows(3, 4, dtype=torch.float64) @ rows(4, 5, dtype=torch.float64),
    "bmm": lambda: torch.baddbmm(rows(2, 3, 3), rows(2, 3, 4), torch.bmm(rows(2, 4, 2), rows(2, 2, 3))),
    "einsum": lambda: torch.einsum("bij,kj->bik", rows(2, 3, 4), rows(5, 4)),
    "convolutions": lambda: functional.conv1d(
        functional.conv_transpose1d(rows(2, 3, 8), rows(3, 4, 3)), rows(2, 4, 3), padding="same"
    ),
    "conv2d": lambda: functional.conv2d(rows(2, 3, 8, 8), rows(4, 3, 3, 3), rows(4)),
    "conv3d": lambda: functional.conv3d(rows(2, 3, 4, 4, 4), rows(4, 3, 3, 3, 3)),
    "norm of a product": lambda: functional.layer_norm(functional.linear(rows(3, 4), rows(5, 4)), (5,), rows(5)),
    "softmax of a product": lambda: torch.softmax(functional.linear(rows(3, 4), rows(5, 4)), -1),
    "losses": lambda: (
        functional.mse_loss(rows(3, dtype=torch.bfloat16), rows(3))
        + functional.cross_entropy(rows(3, 4, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64))
        + functional.binary_cross_entropy_with_logits(rows(3, dtype=torch.bfloat16), rows(3, grad=False))
        + functional.smooth_l1_loss(rows(3, dtype=torch.bfloat16), rows(3, dtype=torch.bfloat16))
    ),
    "fp32": lambda: torch.prod(rows(3, 4, dtype=torch.bfloat16), 1) + torch.trace(rows(3, 3, dtype=torch.bfloat16)),
    "distances": lambda: torch.cdist(rows(3, 4, dtype=torch.bfloat16), rows(5, 4)),
    "grid": lambda: functional.grid_sample(
        rows(1, 2, 4, 4, dtype=torch.bfloat16), rows(1, 3, 3, 2), align_corners=True
    ),
    "transform": lambda: torch.fft.rfft(functional.linear(rows(3, 4), rows(8, 4))).abs(),
    "mixed": lambda: torch.cat([rows(3, 4, dtype=torch.bfloat16), rows(3, 4)]) + torch.stack([rows(4), rows(4)])[0],
    "mixed, in bf16": lambda: torch.cat([rows(3, dtype=torch.bfloat16), rows(3, dtype=torch.bfloat16)]),
    "copied": lambda: rows(3, 4, dtype=torch.bfloat16).index_copy(0, torch.zeros(1, dtype=torch.int64), rows(1, 4)),
    "a weight twice": lambda: (w := rows(4, 4)) @ w + functional.linear(rows(4, 4), w),
    "no leaf": lambda: rows(4, 4) @ (rows(4, 4) * 2),
    "frozen": lambda: rows(4, 4) @ rows(4, 4, grad=False) @ rows(4, 4, grad=False),
}


def ways_of(run: Callable[[], Tensor], device: str, asked: str) -> list[Any]:
    """Return the ops of a forward and backward on a device, with one region in it where autocast is off."""
    with torch.device(device), Ops() as ops:
        with torch.autocast(asked, torch.bfloat16):
            found = run()
            with torch.autocast(asked, enabled=False):
                found = found.float() * rows(*found.shape)
            found = found.sum() + run().sum()
        found.backward()  # type: ignore[no-untyped-call]
    return [one for one in ops.seen if not one[0].startswith(("prim", "aten.detach"))]  # these compute nothing


@pytest.mark.parametrize("asked", ["cpu", "meta"])
@pytest.mark.parametrize("name", LAYERS)
def test_ops_have_the_dtypes_that_they_have_on_the_cpu(name: str, asked: str) -> None:
    native = ways_of(LAYERS[name], "cpu", "cpu")
    with Autocast("cpu", "meta").standing_in():
        assert ways_of(LAYERS[name], "meta", asked) == native
    assert ways_of(LAYERS[name], "meta", "cpu") != native or name in ("of fp64", "mixed, in bf16")


@pytest.mark.parametrize("layer", ["gru", "attention", "encoder"])
def test_layers_have_the_dtypes_that_they_have_on_the_cpu(layer: str) -> None:
    """Of what has other kernels on the CPU: outputs."""
    made: dict[str, Callable[[], nn.Module]] = {
        "gru": lambda: nn.GRU(4, 6),
        "attention": lambda: nn.MultiheadAttention(4, 2),
        "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    }

    def outputs(device: str) -> list[torch.dtype]:
        with torch.device(device), torch.autocast("cpu", torch.bfloat16):
            module, x = made[layer](), rows(3, 2, 4)
            return dtypes_in(module(x, x, x) if layer == "attention" else module(x))

    native = outputs("cpu")
    with Autocast("cpu", "meta").standing_in():
        assert outputs("meta") == native


OF_CUDNN = ("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn")
"""Treated elsewhere than in the header's lists."""


def listed(header: str, macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
    assert body
    names = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"aten::{name}" + (f".{overload}" if overload else "") for name, overload in names}


def test_lists_for_gpus_are_those_of_pytorch() -> None:
    header = HEADER.read_text() + "\n\n"
    lower = listed(header, "AT_FORALL_LOWER_PRECISION_FP")
    treated = autocast.treated("cuda")
    assert lower == autocast._LOWER["cuda"] - {f"aten::{name}" for name in OF_CUDNN}
    assert listed(header, "AT_FORALL_FP32_SET_OPT_DTYPE") == autocast._BY_DTYPE["cuda"] & treated
    assert listed(header, "AT_FORALL_PROMOTE") == autocast._WIDEST["cuda"]
    others = treated - autocast._LOWER["cuda"] - autocast._BY_DTYPE["cuda"]
    others -= autocast._WIDEST["cuda"] | autocast._OTHER_OVERLOADS.keys()
    assert listed(header, "AT_FORALL_FP32") == others - {"aten::binary_cross_entropy"}  # which autocast refuses


def test_products_and_mixtures_for_cpus_are_those_that_have_a_kernel() -> None:
    mine = autocast._LOWER["cpu"] | autocast._WIDEST["cpu"]
    assert mine <= autocast.treated("cpu")


ON_GPUS: list[tuple[Callable[[], Tensor], Sequence[torch.dtype]]] = [
    (lambda: torch.softmax(rows(3, 4, dtype=torch.bfloat16), -1), [torch.float32]),
    (lambda: torch.softmax(rows(3, 4, dtype=torch.bfloat16), -1, dtype=torch.bfloat16), [torch.bfloat16]),
    (lambda: rows(3, 4, dtype=torch.bfloat16).sum(), [torch.float32]),
    (lambda: rows(3, 4, dtype=torch.float64).sum(), [torch.float64]),
    (lambda: torch.ones(3, dtype=torch.int64).sum(), [torch.int64]),
    (lambda: rows(3, 4, dtype=torch.bfloat16).norm(2), [torch.float32]),
    (lambda: rows(3, 4, dtype=torch.bfloat16).norm(2, 1), [torch.float32]),
    (lambda: rows(3, 4, dtype=torch.bfloat16).exp(), [torch.float32]),
    (lambda: functional.layer_norm(rows(3, 4, dtype=torch.bfloat16), (4,)), [torch.float32]),
    (lambda: rows(3, 4, dtype=torch.bfloat16) + rows(3, 4), [torch.float32]),
    (lambda: torch.addcmul(rows(3, dtype=torch.bfloat16), rows(3), rows(3)), [torch.float32]),
    (lambda: torch.addcmul(*(rows(3, dtype=torch.bfloat16) for _ in range(3))), [torch.bfloat16]),
    (lambda: torch.relu(functional.linear(rows(3, 4), rows(5, 4))), [torch.bfloat16]),
    (
        lambda: functional.cross_entropy(rows(3, 4, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)),
        [torch.float32],
    ),
]


@pytest.mark.parametrize(("run", "dtypes"), ON_GPUS)
def test_ops_have_the_dtypes_that_the_documentation_of_autocast_gives_for_gpus(
    run: Callable[[], Tensor], dtypes: Sequence[torch.dtype]
) -> None:
    with Autocast("cuda", "meta").standing_in(), torch.device("meta"), torch.autocast("cuda", torch.bfloat16):
        assert dtypes_in(run()) == dtypes


def test_questions_are_answered_as_on_the_device() -> None:
    stood = Autocast("cuda", "meta")
    with stood.standing_in():
        assert not torch.is_autocast_enabled()
        with torch.autocast("meta"):
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cuda") == torch.float16  # the default on GPUs
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("meta")
        assert not torch.is_autocast_enabled("meta")
    assert list(stood.asked) == [torch.float16]
    assert not torch.is_autocast_enabled("cuda")
    with pytest.raises(RuntimeError):
        torch.autocast("meta", torch.bfloat16)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_contexts_are_what_they_were_before_and_after(device_type: str) -> None:
    """Those that a module holds are entered again where nothing stands in."""
    before = torch.autocast("cpu", torch.bfloat16)
    run = before(lambda x: torch.mm(x, x))  # as a decorator
    with Autocast(device_type, "meta").standing_in():
        within = torch.autocast("meta", torch.bfloat16)
        assert run(torch.empty(2, 2, device="meta")).dtype == (
            torch.bfloat16 if device_type == "cpu" else torch.float32
        )
        with within:
            assert torch.empty(2, 2, device="meta").mm(torch.empty(2, 2, device="meta")).dtype == torch.bfloat16
    assert (before.device, within.device) == ("cpu", device_type)
    assert run(torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.empty(2, 2).mm(torch.empty(2, 2)).dtype == torch.float32


def test_copies_of_weights_are_kept_until_the_context_ends_or_they_are_forgotten() -> None:
    weight = nn.Parameter(torch.empty(4, 4, device="meta"))

    def copies(ops: Ops) -> int:
        return sum("_to_copy" in name for name, _, _ in ops.seen)

    with Autocast("cpu", "meta").standing_in():
        with torch.autocast("cpu", torch.bfloat16), Ops() as ops:
            functional.linear(weight, weight)
            functional.linear(weight, weight)
            assert copies(ops) == 1
            torch.clear_autocast_cache()
            functional.linear(weight, weight)
            assert copies(ops) == 2
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Ops() as ops:
            functional.linear(weight, weight)
            assert copies(ops) == 2


class Small(nn.Module):
    """A body in fp32, and a head under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.head(x)


def source_of(build: Callable[[], nn.Module]) -> ModelSource:
    return ModelSource("small", build, lambda module, batch: ((torch.randn(batch, 32),), {}), 1)


def test_products_are_priced_as_most_weights_are_multiplied() -> None:
    assert trace_model(source_of(Small)).matmul_precision == "fp32"
    assert trace_model(source_of(Small), "amp-bf16").matmul_precision == "bf16"


def test_no_context_is_left_by_a_forward_that_is_interrupted() -> None:
    class Interrupted(Small):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_autocast_enabled("cpu")
            raise KeyboardInterrupt

    module = Interrupted()
    undo = autocast_forwards(module, "amp-bf16", "cpu")
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(1, 32))
    assert not torch.is_autocast_enabled("cpu")
    undo()
    assert "forward" not in vars(module)
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.skipif(torch.cuda.is_available(), reason="contexts of GPUs are on where there is one")
@pytest.mark.filterwarnings("ignore:.*autocast", "ignore:CUDA is not available")
def test_a_context_that_is_off_as_there_is_no_gpu_is_named() -> None:
    class Decorated(Small):
        @torch.autocast("cuda", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    assert any("decorator" in note for note in trace_model(source_of(Decorated), device_type="cuda").notes)
    for quiet in (trace_model(source_of(Small), device_type="cuda"), trace_model(source_of(Decorated))):
        assert not any("decorator" in note for note in quiet.notes)


def test_losses_that_nothing_scales_are_refused() -> None:
    """In fp16, whose gradients may be too small for it."""
    for precision, refused in (("fp32", False), ("bf16", False), ("amp-bf16", False), ("amp-fp16", True)):
        graph, machine = trace_model(source_of(Small), precision), cluster(2, 2)
        plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=1)
        with pytest.raises(OsdpError, match="scale") if refused else nullcontext():
            refuse_fp16(plan, "Lightning")


@pytest.mark.parametrize(("machine", "rate"), [("titan-rtx-8", "fp32"), ("h100-8", "bf16")])
def test_reports_name_the_rate_of_products(machine: str, rate: str) -> None:
    """A card without bf16 has none for what a model asks for itself."""

    class Asks(Small):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.head(self.body(x))

    graph = trace_model(source_of(Asks))
    assert graph.autocast == "bf16"
    assert rates(load_cluster(machine), model_ref(graph)).startswith(f"{rate} ")
