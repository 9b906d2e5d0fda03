"""Imports point one way: profiler -> planner -> runtime -> osdp, no files import each other, and each folder has its
libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = ("profiler", "planner", "runtime", "osdp")
PLAIN_DATA = frozenset(
    f"profiler.{name}"
    for name in (
        "affine",
        "model_graph",
        "cluster.cluster",
        "cluster.figure",
        "cluster.measurements",
        "errors",
        "yaml_files",
        "bounds",
        "byte_sizes",
        "path_labels",
        "garbage_collection",
    )
)
"""The profiler's modules that need no torch: what passes between stages, its files, and the garbage collector."""
SHARED = frozenset(
    f"profiler.{name}"
    for name in (
        "alias_outputs",
        "collective_ops",
        "computed_attributes",
        "early_stops",
        "fake_devices",
        "handed_containers",
        "kept_storage",
        "linear_layers",
        "mixed_precision",
        "nested_tensors",
        "offloaded_input",
        "opaque_parameters",
        "plain_attributes",
        "reentrant_checkpoints",
        "remembered_attributes",
        "rerun_arguments",
        "selective_recomputation",
        "simulated_ranks",
    )
)
"""What the tracer does to a model and the runtime must do alike."""
PLANS = frozenset({"planner.plan", "planner.pricing", "planner.strategies", "planner.model", "planner.optimizers"})
"""The planner's modules that say what a plan means."""


@dataclass(frozen=True)
class Rule:
    """What the files of one folder may import beyond the standard library and the folder itself."""

    own: frozenset[str]
    """Modules of this project, or whole packages."""
    libraries: frozenset[str]
    """Third-party packages."""
    lazy: frozenset[str] = frozenset()
    """Third-party packages that only functions may import."""


RULES = {
    "profiler": Rule(
        frozenset(),
        frozenset({"annotated_types", "torch", "networkx", "numpy", "pydantic", "yaml"}),
        frozenset({"pynvml"}),
    ),
    "planner": Rule(PLAIN_DATA, frozenset({"annotated_types", "networkx", "numpy", "pulp", "highspy"})),
    "runtime": Rule(PLAIN_DATA | PLANS | SHARED, frozenset({"torch", "numpy"}), frozenset({"cupy", "safetensors"})),
    "osdp": Rule(
        frozenset({"profiler", "planner", "runtime"}),
        frozenset({"torch", "networkx", "numpy", "pulp", "pydantic", "yaml", "typer", "rich", "fairscale"}),
        frozenset({"cupy", "jinja2", "matplotlib", "mlflow", "plotly", "tensorboard", "transformers", "wandb"}),
    ),
}


INTEGRATED = frozenset({"accelerate", "lightning", "ray", "transformers"})
"""What the files of `osdp/integrations` are for, and import at the top."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    module: str
    """Absolute dotted name; of `from a import b`, `a.b` where that is a module of this project."""
    line: int
    at_top: bool
    """Whether it runs when the file is imported; not so in functions and under TYPE_CHECKING."""


@cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of this project."""
    path = CHECKOUT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports_of(
    tree: ast.AST, package: str, at_top: bool = True, is_module: Callable[[str], bool] = is_module
) -> Iterator[Import]:
    """Yield the imports of a file in `package` (dotted)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield Import(inner if is_module(inner) else module, node.lineno, at_top)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
            yield from imports_of(node, package, at_top and not lazy, is_module)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def violations(source: str, folder: str, package: str) -> list[str]:
    """Return what a file breaks of its folder's rule."""
    rule = RULES[folder]
    libraries = rule.libraries | (INTEGRATED if package == "osdp.integrations" else frozenset())
    found = []
    for item in imports_of(parsed(source), package):
        top = item.module.split(".")[0]
        if top == folder or top in sys.stdlib_module_names:
            continue
        if top in FOLDERS:
            allowed = any(item.module == own or item.module.startswith(own + ".") for own in rule.own)
        else:
            allowed = top in libraries or (top in rule.lazy and not item.at_top)
        if not allowed:
            found.append(f"line {item.line}: {item.module}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_keep_to_the_rule(folder: str) -> None:
    files = [path.relative_to(CHECKOUT) for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    assert files
    found = [
        f"{path}: {violation}"
        for path in files
        for violation in violations((CHECKOUT / path).read_text(), folder, ".".join(path.parent.parts))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("profiler", "import planner"),
        ("profiler", "from runtime import *"),
        ("profiler", "import osdp.cli"),
        ("profiler", "import pulp"),
        ("planner", "import torch"),
        ("planner", "def f():\n    import torch.nn as nn"),
        ("planner", "if TYPE_CHECKING:\n    from torch import nn"),
        ("planner", "from profiler import model_source"),
        ("planner", "import profiler.model_source"),
        ("planner", "from runtime.wrap import wrap"),
        ("runtime", "import pulp"),
        ("runtime", "import cupy"),
        ("runtime", "try:\n    import cupy\nexcept ImportError:\n    cupy = None"),
        ("runtime", "from planner.search.search import search"),
        ("osdp", "import pandas"),
        ("osdp", "import accelerate"),
        ("osdp", "import lightning"),
    ],
)
def test_each_forbidden_import_is_noticed(folder: str, source: str) -> None:
    assert len(violations(source, folder, folder)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("profiler", "import torch\nfrom profiler.model_graph import Affine"),
        ("planner", "from profiler.model_graph import Affine\nfrom profiler import errors, yaml_files\nimport pulp"),
        ("planner", "from .collectives import PASSES\nfrom . import collectives"),
        ("runtime", "from planner.plan import Plan\ndef f():\n    import cupy"),
        ("runtime", "from planner.model import stages, fsdp_units\nfrom planner.strategies.spec import Strategy"),
        ("osdp", "import planner.strategies.registry, profiler.model_source, runtime, torch, yaml"),
    ],
)
def test_each_allowed_import_passes(folder: str, source: str) -> None:
    assert violations(source, folder, folder) == []


def edges_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which modules each module imports, at the top, in functions or for types alone.

    `sources` has the text of every file by its dotted name, a package's `__init__.py` by the package's.
    Such a file is the target of `from package import name`, but not of `from package import module`
    nor of `import package.module`: these pass through it for the sake of another file.
    """
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        # Relative imports start at the package: a file's is its parent, that of an __init__.py itself.
        is_package = any(other.startswith(f"{name}.") for other in sources)
        package = name if is_package else name.rpartition(".")[0]
        imported = {item.module for item in imports_of(parsed(source), package, is_module=sources.__contains__)}
        found[name] = imported & sources.keys() - {name}
    return found


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of files that import each other, directly or through others."""
    graph = nx.DiGraph((name, other) for name, others in edges_of(sources).items() for other in others)
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def test_no_files_import_each_other() -> None:
    paths = [path.relative_to(CHECKOUT) for folder in FOLDERS for path in (CHECKOUT / folder).rglob("*.py")]
    names = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    assert len(paths) > 100
    assert circles({name: (CHECKOUT / path).read_text() for path, name in names.items()}) == []


ROOMS = ("strategies", "model", "cost", "options", "solve", "search", "analysis")
"""Of the planner: each stands only on those before it."""


def test_rooms_of_the_planner_stand_on_those_below() -> None:
    assert {path.parent.name for path in (CHECKOUT / "planner").glob("*/*.py")} == {*ROOMS}
    paths = {f"planner.{path.parent.name}.{path.stem}": path for path in (CHECKOUT / "planner").glob("*/*.py")}
    edges = edges_of({name: path.read_text() for name, path in paths.items()})
    above = {
        (name, other)
        for name, others in edges.items()
        for other in others
        if ROOMS.index(other.split(".")[1]) > ROOMS.index(name.split(".")[1])
    }
    assert len(paths) > 50
    assert above == set()


CHAIN = {"a": "", "a.x": "from a import y", "a.y": "from a.z import f", "a.z": ""}
"""Files without a circle, until one is closed."""


@pytest.mark.parametrize(
    "closing",
    [
        "import a.x",
        "from a.x import g",
        "from a import x",
        "from . import x",
        "from .x import g",
        "def f():\n    from a import x",
        "if TYPE_CHECKING:\n    from a.x import g",
        "class C:\n    def f(self):\n        import a.x as x",
        "try:\n    import a.x\nexcept ImportError:\n    pass",
    ],
)
def test_each_circle_is_noticed(closing: str) -> None:
    assert circles(CHAIN) == []
    assert circles(CHAIN | {"a.z": closing}) == [["a.x", "a.y", "a.z"]]


def test_a_package_is_in_a_circle_only_where_it_is_imported_itself() -> None:
    package = {"a": "def __getattr__(name):\n    from a import x", "a.x": "from a import z\nimport a.z", "a.z": ""}
    assert circles(package) == []
    assert circles(package | {"a.z": "from a import VERSION"}) == [["a", "a.x", "a.z"]]
    assert circles(package | {"a.z": "import a"}) == [["a", "a.x", "a.z"]]


def test_planning_needs_no_torch() -> None:
    """Whatever its modules import, in turn, and by whatever means."""
    names = [
        ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)
        for path in sorted((CHECKOUT / "planner").rglob("*.py"))
        if path.stem != "__init__"
    ]
    assert names
    program = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'cupy', 'runtime', 'osdp') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("folder", ["cuda", "configs"])
def test_data_folders_hold_no_python(folder: str) -> None:
    """A package `cuda` on `sys.path` would hide NVIDIA's from CuPy."""
    assert (CHECKOUT / folder).is_dir()
    assert list((CHECKOUT / folder).rglob("*.py")) == []
