"""A user's `profiler.py`, `planner/` or `runtime` must be told apart from OSDP's own."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from osdp import _shadowing

CHECKOUT = Path(__file__).resolve().parents[2]


def run(directory: Path, *arguments: str, path: Sequence[Path] = (CHECKOUT,)) -> CompletedProcess[str]:
    """Run Python in `directory`; `path` comes after the script's own directory on `sys.path`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def shadow(directory: Path, name: str, kind: str) -> Path:
    """Make something that Python imports as `name`, and return what the message must name."""
    if kind == "module":
        target = directory / f"{name}.py"
        target.write_text("raise RuntimeError('must not be imported')\n")
        return target
    target = directory / name
    target.mkdir()
    (target / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    return target


@pytest.mark.parametrize("kind", ["module", "package"])
@pytest.mark.parametrize("name", ["planner", "profiler", "runtime"])
def test_script_beside_a_shadow_gets_an_import_error(tmp_path: Path, name: str, kind: str) -> None:
    culprit = shadow(tmp_path, name, kind)
    (tmp_path / "train.py").write_text(
        "try:\n    import osdp\nexcept ImportError as error:\n    print('CAUGHT', error)\n"
    )
    result = run(tmp_path, "train.py")
    assert result.returncode == 0, result.stderr
    assert f"CAUGHT {culprit.resolve()} shadows OSDP's package `{name}`" in result.stdout
    assert f"expected: {CHECKOUT / name}" in result.stdout
    assert "rename it" in result.stdout


def test_uncaught_the_message_closes_the_traceback(tmp_path: Path) -> None:
    shadow(tmp_path, "profiler", "module")
    (tmp_path / "train.py").write_text("from osdp import __version__\n")
    result = run(tmp_path, "train.py")
    assert result.returncode == 1
    assert "ImportError: " in result.stderr
    assert "rename it" in result.stderr.splitlines()[-1]


def test_safe_path_mends_it(tmp_path: Path) -> None:
    shadow(tmp_path, "profiler", "module")
    (tmp_path / "train.py").write_text("import osdp, profiler\nprint(profiler.__file__)\n")
    result = run(tmp_path, "-P", "train.py")
    assert result.stdout.strip() == str(CHECKOUT / "profiler" / "__init__.py"), result.stderr


def test_python_m_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    culprit = shadow(tmp_path, "profiler", "module")
    result = run(tmp_path, "-m", "osdp", "plan")
    assert result.returncode == 2
    assert result.stderr.startswith(f"{culprit.resolve()} shadows OSDP's package `profiler`\n")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_command_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    """The script that pip writes for the entry point, under a PYTHONPATH that shadows."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "osdp").write_text("import sys\nfrom osdp.cli import main\nsys.exit(main())\n")
    shadow(tmp_path, "runtime", "package")
    result = run(tmp_path, str(commands / "osdp"), "plan", path=(tmp_path, CHECKOUT))
    assert result.returncode == 2
    assert "shadows OSDP's package `runtime`" in result.stderr
    assert "Traceback" not in result.stderr


def test_nothing_is_said_without_a_shadow(tmp_path: Path) -> None:
    """Also when OSDP's own packages were imported first."""
    (tmp_path / "train.py").write_text("import profiler, planner, osdp\nprint(osdp.__version__)\n")
    result = run(tmp_path, "train.py")
    assert (result.returncode, result.stderr) == (0, "")


def test_import_is_light(tmp_path: Path) -> None:
    heavy = ("torch", "numpy", "pydantic", "networkx", "pulp", "planner", "profiler", "runtime")
    result = run(tmp_path, "-c", f"import sys, osdp; print([m for m in {heavy} if m in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_module_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("profiler")
    module.__spec__ = None
    module.__file__ = "/elsewhere/profiler.py"
    monkeypatch.setitem(sys.modules, "profiler", module)
    message = _shadowing.find_shadow()
    assert message is not None
    assert message.startswith("/elsewhere/profiler.py shadows OSDP's package `profiler`")


def test_folder_without_init(tmp_path: Path) -> None:
    """A plain folder comes before an editable install, whose finder is asked last."""
    (tmp_path / "runtime").mkdir()
    program = f"""
import sys
from importlib.machinery import PathFinder

class Last:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(CHECKOUT)!r}]) if path is None else None

sys.meta_path.append(Last)
import osdp
"""
    result = run(tmp_path, "-S", "-c", program, path=())
    assert f"ImportError: {tmp_path.resolve() / 'runtime'} shadows OSDP's package `runtime`" in result.stderr


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "planner", None)
    message = _shadowing.find_shadow()
    assert message is not None
    assert message.startswith("OSDP's package `planner` is missing")
