"""What setup.cfg says, and what a wheel made of it holds."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import osdp
from profiler.errors import install_advice

CHECKOUT = Path(__file__).resolve().parents[2]
CODE = ("osdp", "planner", "profiler", "runtime")
DATA = {"configs": "*.[yjg]*", "cuda": "*.cu"}


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(CHECKOUT / "setup.cfg")
    return parser


def data_files() -> set[str]:
    """Return the files of configs/ and cuda/, relative to the checkout."""
    files = [path for folder, pattern in DATA.items() for path in (CHECKOUT / folder).rglob(pattern)]
    return {path.relative_to(CHECKOUT).as_posix() for path in files}


def test_every_package_is_listed(setup_cfg: configparser.ConfigParser) -> None:
    """`packages` is written by hand."""
    on_disk = {
        ".".join(path.parent.relative_to(CHECKOUT).parts)
        for folder in CODE
        for path in (CHECKOUT / folder).rglob("__init__.py")
    }
    listed = setup_cfg["options"]["packages"].split()
    assert set(listed) == on_disk | {f"osdp.{folder}" for folder in DATA}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for folder in CODE for path in (CHECKOUT / folder).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", ["examples", "scripts", "scripts/bench"])
def test_no_program_stands_before_a_package(folder: str) -> None:
    """Python looks for imports in the folder of the program first."""
    names = {path.stem for path in (CHECKOUT / folder).glob("*.py")}
    assert names
    paths = [place for place in sys.path if Path(place).resolve() != CHECKOUT / folder]
    assert {name for name in names if PathFinder.find_spec(name, paths)} == set()


def test_constraints_pin_a_torch_that_setup_cfg_accepts(setup_cfg: configparser.ConfigParser) -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert "torch>=2.11,<2.14" in setup_cfg["options"]["install_requires"].split()


def test_every_pinned_version_is_one_that_setup_cfg_accepts(setup_cfg: configparser.ConfigParser) -> None:
    options = setup_cfg["options.extras_require"]
    texts = (setup_cfg["options"]["install_requires"] + "".join(options.values())).splitlines()
    accepted: dict[str, list[SpecifierSet]] = {}
    for text in texts:
        if text and not text.startswith("#"):
            accepted.setdefault(canonicalize_name(Requirement(text).name), []).append(Requirement(text).specifier)
    pins = [Requirement(line) for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if line[:1].isalpha()]
    for pin in pins:
        (pinned,) = pin.specifier
        assert all(pinned.version in ranges for ranges in accepted[canonicalize_name(pin.name)]), pin


def test_license_is_the_one_named(setup_cfg: configparser.ConfigParser) -> None:
    assert setup_cfg["metadata"]["license_expression"] == "Apache-2.0"
    text = (CHECKOUT / "LICENSE").read_text()
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert "END OF TERMS AND CONDITIONS" in text


# ---- What readers are told to install ------------------------------------------------------------

STRANGERS = "osdp|planner|profiler|runtime"
"""On the package index these are other people's projects; ours is not there yet, under any name."""
WRONG_INSTALL = re.compile(
    # The names of a command, up to the end of the sentence; `-e .` and paths are no names.
    rf"\bpip3?\s+install\b(?:[^\n;`|#]*?[\s'\"])?(?:{STRANGERS})(?![\w/]|\.\w)[^\s;`]*"
    rf"|\b(?:{STRANGERS})(?:-planner)?\\?\[(?:cuda1\d|hf|plot|report|test)\\?\]"
)
TEXT_SUFFIXES = {".cfg", ".cu", ".in", ".md", ".py", ".sh", ".toml", ".txt", ".yaml"}


def test_nobody_is_told_to_install_a_stranger() -> None:
    ours = [*CODE, *DATA, "docs", "examples", "scripts", "tests"]
    files = [*CHECKOUT.glob("*"), *(path for folder in ours for path in (CHECKOUT / folder).rglob("*"))]
    texts = [path for path in files if path.suffix in TEXT_SUFFIXES and path != Path(__file__).resolve()]
    assert {CHECKOUT / "README.md", CHECKOUT / "docs" / "planning.md", CHECKOUT / "osdp" / "plots.py"} <= set(texts)
    found = {str(path): WRONG_INSTALL.findall(path.read_text()) for path in texts}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install osdp",
        "(`pip3 install osdp`)",
        "pip install 'osdp[hf]'",
        'pip install "osdp[plot]"',
        "pip install\n'osdp[plot]'",
        "pip install --upgrade osdp==0.1.0",
        "python -m pip install osdp[cuda12]",
        "pip install osdp-planner",
        "pip install torch planner",
        "pip install profiler",
        "pip install runtime.",
        "or 'osdp[cuda13]'",
        r"pip install 'osdp\[cuda13\]'",
    ],
)
def test_a_wrong_instruction_is_noticed(text: str) -> None:
    assert WRONG_INSTALL.search(f"Then {text} and so on")


@pytest.mark.parametrize(
    "text",
    [
        install_advice("plot"),
        ".venv/bin/pip install -e .",
        "pip install -e ./osdp",
        ".venv/bin/pip install matplotlib; the planner draws",
        "pip install torch-tb-profiler",
    ],
)
def test_a_right_instruction_is_not(text: str) -> None:
    assert not WRONG_INSTALL.search(f"Then {text}")


def test_advice_names_an_extra(setup_cfg: configparser.ConfigParser) -> None:
    assert install_advice("cuda13") == ".venv/bin/pip install -e '.[cuda13]'"
    said = {path: re.findall(r"pip install -e '\.\[(\w+)\]'", path.read_text()) for path in CHECKOUT.glob("docs/*.md")}
    assert {extra for extras in said.values() for extra in extras} <= set(setup_cfg["options.extras_require"])


# ---- The wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the checkout, without any download."""
    try:
        if int(version("setuptools").split(".")[0]) < 77:
            pytest.skip("setuptools is older than 77 (the extra `test` brings it)")
    except PackageNotFoundError:
        pytest.skip("setuptools is not installed (the extra `test` brings it)")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*CODE, *DATA):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, cwd=folder
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_data_inside_osdp(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    shipped = {f"osdp/{name}" for name in data_files()}
    shipped |= {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "osdp" / "report" / "page").iterdir()}
    assert shipped
    assert shipped <= names
    assert {name.split("/")[0] for name in names} == {*CODE, f"osdp_planner-{osdp.__version__}.dist-info"}
    assert not names & {f"osdp/{folder}/__init__.py" for folder in DATA}


def test_wheel_declares_what_it_needs(wheel: Path) -> None:
    information = f"osdp_planner-{osdp.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{information}/METADATA").decode()
        commands = archive.read(f"{information}/entry_points.txt").decode()
    assert "Name: osdp-planner\nVersion: 0.1.0\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "osdp = osdp.cli:main" in commands
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")}
    assert extras == {"cuda12", "cuda13", "docs", "hf", "lightning", "plot", "ray", "report", "test"}
    needs = [line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    always = {re.split(r"[<>=]", need)[0] for need in needs if "extra ==" not in need}
    interface = {"pyyaml", "pydantic", "typer", "rich", "tensorboard", "fairscale", "nvidia-ml-py"}
    assert always == {"torch", "pulp", "highspy", "networkx", "numpy", "annotated-types"} | interface


def test_installed_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    """With the checkout out of reach: the wheel alone is on the path."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import osdp, planner\n"
        "from osdp.resources import resource_dir, resource_names\n"
        "print(osdp.__file__, planner.__file__, resource_dir('configs'), resource_dir('cuda'), sep='\\n')\n"
        "from osdp.planning.zoo_graphs import zoo_graph\n"
        "print(zoo_graph('gpt2-tiny', None, 'bf16') is not None)\n"
        "print(*resource_names('models'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *places, has_graphs, models = result.stdout.splitlines()
    assert has_graphs == str(version("torch").startswith("2.13.0"))
    expected = ["osdp/__init__.py", "planner/__init__.py", "osdp/configs", "osdp/cuda"]
    assert places == [str(site.resolve() / place) for place in expected]
    assert models.split() == sorted(path.stem for path in (CHECKOUT / "configs" / "models").glob("*.yaml"))
