"""Graphs of the zoo's models that come with OSDP, so that not even the first plan of one needs PyTorch.

    configs/graphs/gpt2-1.5b-bf16.json.gz   text of a graph, see `profiler.graph_file`
    configs/graphs/traced.json              what they depend on: `MadeFrom`

`scripts/trace_zoo.py` writes them.  A graph is of use as long as the version of PyTorch, the text of OSDP's tracer and
the sizes of the model are those that it was traced with; otherwise the model is traced anew.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from osdp.resources import resource_dir
from osdp.zoo import model_contents, model_names
from profiler.errors import OsdpError
from profiler.graph_file import graph_from_text, graph_to_text
from profiler.model_graph import ModelGraph
from profiler.yaml_files import write_bytes_atomic, write_text_atomic

PRECISIONS = ("fp32", "bf16")
DEVICE_TYPE = "cuda"
"""What graphs come with OSDP for."""
_INDEX = "traced.json"
_TRACERS = ("profiler/**/*.py", "osdp/models/**/*.py", "osdp/zoo.py")
"""Files on whose text graphs depend."""


@dataclass(frozen=True)
class MadeFrom:
    """What the graphs that come with OSDP depend on."""

    SCHEMA: ClassVar[str] = "osdp.zoo_graphs/1"

    torch: str
    """Version, without that of CUDA: shapes and kernels' sizes do not depend on it."""
    tracer: str
    """SHA-256 of OSDP's tracer."""
    models: dict[str, str]
    """`osdp.zoo.model_contents` of each."""

    @classmethod
    def now(cls) -> MadeFrom:
        """Return what graphs that are traced now depend on; raises OsdpError without PyTorch."""
        return cls(_torch_version(), tracer_hash(), {name: str(model_contents(name, None)) for name in model_names()})


def zoo_graph(name: str, sequence_length: int | None, precision: str) -> ModelGraph | None:
    """Return the graph that comes with OSDP for CUDA devices; None: there is none, or it is out of date."""
    folder = resource_dir("configs") / "graphs"
    with suppress(OsdpError, OSError, EOFError, zlib.error, ValueError, TypeError):
        index = json.loads((folder / _INDEX).read_text())
        if index.pop("schema") != MadeFrom.SCHEMA:
            return None
        made = MadeFrom(**index)
        if made.models.get(name) != model_contents(name, sequence_length):
            return None
        if (made.torch, made.tracer) == (_torch_version(), tracer_hash()):
            return graph_from_text(gzip.decompress((folder / _file(name, precision)).read_bytes()).decode())
    return None


def write_zoo_graphs(graphs: dict[tuple[str, str], ModelGraph]) -> None:
    """Write the graphs of all of the zoo's models, by name and precision; raises OsdpError."""
    folder = resource_dir("configs") / "graphs"
    for (name, precision), graph in graphs.items():
        # The time of writing would make files of equal graphs differ.
        write_bytes_atomic(folder / _file(name, precision), gzip.compress(graph_to_text(graph).encode(), mtime=0))
    made = {"schema": MadeFrom.SCHEMA, **asdict(MadeFrom.now())}
    write_text_atomic(folder / _INDEX, json.dumps(made, indent=1) + "\n")


def tracer_hash() -> str:
    """Return a hash of the text of all of OSDP that graphs depend on."""
    hashed = sha256()
    for path in _tracer_files():
        hashed.update(path.read_bytes() + b"\0")
    return hashed.hexdigest()


def _tracer_files() -> Iterator[Path]:
    root = Path(__file__).resolve().parents[2]
    for pattern in _TRACERS:
        yield from (path for path in sorted(root.glob(pattern)) if not path.name.startswith("."))  # editors' own


def _torch_version() -> str:
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        raise OsdpError("PyTorch is not installed", advice="install OSDP again") from None


def _file(name: str, precision: str) -> str:
    return f"{name}-{precision}.json.gz"
