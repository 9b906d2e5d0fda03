"""Models by name, whose graphs are kept on disk: a trace needs PyTorch, which takes longer to import than a search.

    NamedModel --(kept?)--> ModelGraph
               --load_model--> ModelSource --trace_model--> ModelGraph --> kept

A graph is kept where all that it depends on is known: of models of the zoo, of their files, and of Hugging Face
configurations, and not of the user's own code.  Its key is a hash of the configuration, of what the trace was asked, of
the text of OSDP's packages that trace, and of the versions of all installed packages, so that it is not found when any
of these has changed.  A kept graph that is missing, damaged or of no use is traced anew.  Graphs of the zoo come with
OSDP (`osdp.planning.zoo_graphs`).

`OSDP_CACHE_DIR` is the folder, by default `osdp` in `$XDG_CACHE_HOME` or `~/.cache`; nothing is kept if it is empty.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from osdp.planning.zoo_graphs import DEVICE_TYPE, tracer_hash, zoo_graph
from osdp.zoo import load_model, model_contents
from profiler.cluster.visible_gpus import has_driver
from profiler.errors import OsdpError
from profiler.graph_file import graph_from_text, graph_to_text
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.yaml_files import read_text, write_text_atomic

FOLDER = "OSDP_CACHE_DIR"
"""Environment variable."""
MOST_GRAPHS = 100
"""That are kept; the ones unused for longest go."""
_SETTINGS = ("ACCELERATE_", "FSDP_", "HF_", "PYTORCH_", "TORCH_", "TRANSFORMERS_", "USE_")
"""Starts of the names of environment variables that may change a model."""
_OWN_SETTING = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Which loading a Hugging Face configuration sets."""


@dataclass(frozen=True)
class Traced:
    """The graph of a model."""

    graph: ModelGraph
    trace_s: float | None
    """Seconds that tracing took; None: the graph is of an earlier trace."""


@dataclass(frozen=True)
class TraceSettings:
    """What a model is traced for; see `profiler.trace.trace.trace_model`."""

    precision: str
    device_type: str
    micro_batch: int | None = None
    master_weights: str = ""
    expert_imbalance: float = 1.0
    world_size: int | None = None

    def trace(self, source: ModelSource) -> Traced:
        """Trace a model; raises OsdpError."""
        from profiler.trace.trace import trace_model  # imports torch, which takes longer than all the rest

        began_s = time.perf_counter()
        asked = self.precision, self.device_type, self.micro_batch, self.master_weights, self.expert_imbalance
        graph = trace_model(source, *asked, world_size=self.world_size)
        return Traced(graph, time.perf_counter() - began_s)


@dataclass(frozen=True)
class NamedModel:
    """A model as the user names it; it is loaded when it has to be traced."""

    name: str
    """As for `osdp.zoo.load_model`."""
    sequence_length: int | None = None
    """None: the model's own."""

    def load(self) -> ModelSource:
        """Return the model; raises OsdpError."""
        return load_model(self.name, sequence_length=self.sequence_length)

    def traced(self, settings: TraceSettings) -> Traced:
        """Return the model's graph, which came with OSDP, was kept or is traced now; raises OsdpError."""
        # A trace that no micro-batch was named for, if there is one, is right for each; where no collective ran, it is
        # right for any number of ranks.
        of_any = replace(settings, micro_batch=None, world_size=None)
        if of_any == TraceSettings(settings.precision, DEVICE_TYPE):
            graph = zoo_graph(self.name, self.sequence_length, settings.precision)
            if graph is not None:
                return Traced(graph, None)
        of_any_ranks = replace(settings, world_size=None)
        for path in map(self._path, dict.fromkeys((of_any, of_any_ranks, settings))):
            with suppress(OsdpError):
                if path is not None:
                    return Traced(_kept(path), None)
        traced = settings.trace(self.load())
        path = self._path(settings if traced.graph.world_size else of_any_ranks)
        if path is not None:
            _keep(path, traced.graph)
        return traced

    def _path(self, settings: TraceSettings) -> Path | None:
        """Return the file of the kept graph; None: it is not known what the model depends on, or nothing is kept."""
        folder = cache_folder()
        with suppress(OsdpError, OSError):  # which loading it raises too, where it matters
            contents = model_contents(self.name, self.sequence_length)
            if folder is None or contents is None:
                return None
            hashed = sha256()
            for part in (self.name, contents, repr(settings), *_surroundings()):
                hashed.update((part.encode(errors="surrogateescape") if isinstance(part, str) else part) + b"\0")
            return folder / "graphs" / f"{hashed.hexdigest()}.json"
        return None


def cache_folder() -> Path | None:
    """Return the folder in which OSDP keeps what it can make again; None: the user wants none, or has no home."""
    named = os.environ.get(FOLDER)
    if named is not None:
        return Path(named) if named else None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "osdp"


def _surroundings() -> Iterator[str | bytes]:
    """Yield what a graph depends on beside its model: Python, installed packages, OSDP's tracer, and settings."""
    yield f"{sys.version} {platform.machine()} {has_driver()}"
    for entry in sys.path:
        with suppress(OSError):
            names = os.listdir(entry or ".")
            yield from sorted(name for name in names if name.endswith((".dist-info", ".egg-info")))
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:  # PyTorch may be built where it lies
        yield Path(torch.origin).with_name("version.py").read_bytes()
    yield tracer_hash()
    settings = ((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    yield repr(sorted(item for item in settings if item[0] != _OWN_SETTING))


def _kept(path: Path) -> ModelGraph:
    """Return a graph, which is then the one used last; raises OsdpError."""
    graph = graph_from_text(read_text(path))
    with suppress(OSError):
        os.utime(path)
    return graph


def _keep(path: Path, graph: ModelGraph) -> None:
    """Write a graph, and remove the oldest of too many; a folder that cannot be written keeps nothing."""
    with suppress(OsdpError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, graph_to_text(graph))
        kept = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in kept[:-MOST_GRAPHS]:
            old.unlink(missing_ok=True)
