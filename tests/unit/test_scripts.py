"""The shell scripts, with a stand-in for Python that makes environments and "installs" at once.

The stand-in is a shell script: `-m venv` and `-m pip` are played, by `STUB_PIP`; any other call
goes to the real Python, whose version and modules a `sitecustomize` may change.  Its answers to `-c` are kept
for all tests: the scripts ask the same again and again, and a start of Python takes most of a test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest
from thoroughness import THOROUGH

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "chmod", "cp", "dirname", "grep", "mkdir", "rm", "sed", "tail")

PYTHON = """#!/bin/sh
echo "$@" >>"{log}"
case "$*" in
"-m venv --clear "*)
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
"-m pip --version") [ ! -f "${{0%/*}}/no-pip" ] ;;
"-m pip install"*)
    case "${{STUB_PIP:-works}}" in
    works) printf '#!/bin/sh\\necho osdp "$@"\\n' >"${{0%/*}}/osdp"; chmod +x "${{0%/*}}/osdp" ;;
    offline) echo "WARNING: after connection broken by 'NewConnectionError(...)': /simple/x/"; exit 1 ;;
    *) echo "ERROR: $STUB_PIP"; exit 1 ;;
    esac ;;
"-m pip --disable-pip-version-check uninstall"*) ;;
"-m ruff"* | "-m mkdocs"* | "-m mypy"* | "-m pytest"*) echo "ran $*"; [ "$2" != "${{STUB_FAILS:-}}" ] ;;
"-c "*)
    known="{known}$(echo "$2" | cksum | sed 's/ /-/')"
    if [ ! -f "$known.status" ]; then
        PYTHONPATH="{site}" "{real}" "$@" >"$known.out" 2>"$known.err"
        echo $? >"$known.status"
    fi
    cat "$known.err" >&2
    cat "$known.out"
    exit "$(cat "$known.status")" ;;
*) PYTHONPATH="{site}" exec "{real}" "$@" ;;
esac
"""

OLD = "import sys\nsys.version_info = (3, 10, 12, 'final', 0)\n"
NO_ENSUREPIP = "import sys\nsys.modules['ensurepip'] = None\n"
BROKEN = "raise SystemExit(1)\n"


class Sandbox:
    """A copy of the scripts, and a PATH that holds nothing but a few tools and the stand-ins."""

    def __init__(self, directory: Path, answers: Path) -> None:
        self.answers = answers
        self.root = directory / "a checkout"
        self.path = directory / "bin"
        self.log = directory / "calls"
        self.elsewhere = directory / "elsewhere"
        self.distributed = directory / "usr"
        for folder in (self.root, self.path, self.elsewhere, self.distributed):
            folder.mkdir()
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        self.driver_file = directory / "driver"
        functions = self.root / "scripts" / "_environment.sh"
        text = functions.read_text().replace("/proc/driver/nvidia/version", f'"{self.driver_file}"')
        functions.write_text(text.replace("/usr/bin", str(self.distributed)))
        for name in ("setup.cfg", "constraints.txt"):
            shutil.copy(CHECKOUT / name, self.root)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.path / tool).symlink_to(found)

    @property
    def venv(self) -> Path:
        """The environment that the scripts make."""
        return self.root / ".venv"

    def add_python(self, name: str, sitecustomize: str = "", *, distributed: bool = False) -> None:
        """Put a stand-in on PATH or where a distribution has its own, whose real Python first runs `sitecustomize`."""
        folder = self.distributed if distributed else self.path
        site = self.path.parent / f"site-{folder.name}-{name}"
        site.mkdir()
        (site / "sitecustomize.py").write_text(sitecustomize)
        stub = folder / name
        known = self.answers / f"{crc32(sitecustomize.encode())}-"
        stub.write_text(PYTHON.format(log=self.log, site=site, real=sys.executable, known=known))
        stub.chmod(0o755)

    def add_nvidia_smi(self, version: str = "", status: int = 0) -> None:
        """Put an nvidia-smi on PATH that prints such a head, or none, and exits so."""
        head = f"| NVIDIA-SMI 570.86.15     Driver Version: 570.86.15     {version}     |"
        stub = self.path / "nvidia-smi"
        stub.write_text(f"#!/bin/sh\necho '{head if version else 'a new format'}'\nexit {status}\n")
        stub.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script from another directory, without a terminal."""
        command = ["sh", str(self.root / "scripts" / script), *arguments]
        environment = {"PATH": str(self.path), "HOME": str(self.elsewhere), **environment}
        return subprocess.run(command, cwd=self.elsewhere, env=environment, capture_output=True, text=True)

    def calls(self, start: str) -> list[str]:
        """Return the calls of any stand-in so far that begin so."""
        lines: Iterable[str] = self.log.read_text().splitlines() if self.log.exists() else ()
        return [line for line in lines if line.startswith(start)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def sandbox(tmp_path: Path, answers: Path) -> Sandbox:
    return Sandbox(tmp_path, answers)


def assert_refused(result: subprocess.CompletedProcess[str], what: str, advice: str) -> None:
    """Exit 2, nothing on stdout, and an error that says what is wrong and what to try."""
    assert (result.returncode, result.stdout) == (2, "")
    what_line, try_line = result.stderr.splitlines()[-2:]
    assert what in what_line
    assert try_line.startswith("  try: ")
    assert advice in try_line


def test_quickstart_installs_and_plans(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("quickstart.sh", "--json", "a b")
    assert (result.returncode, result.stdout) == (0, "osdp plan --model gpt2-1.5b --mem 8GB --json a b\n")
    root = sandbox.root
    (install,) = sandbox.calls("-m pip install")
    assert install.endswith(f" -c {root}/constraints.txt -e {root}")


def test_second_run_reuses_the_environment_at_once(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    sandbox.run("quickstart.sh")
    start = time.monotonic()
    result = sandbox.run("quickstart.sh")
    assert time.monotonic() - start < 5
    assert (result.returncode, result.stderr) == (0, "")
    assert len(sandbox.calls("-m pip install")) == 1


@pytest.mark.parametrize("name", ["setup.cfg", "constraints.txt"])
def test_changed_metadata_installs_again_into_the_same_environment(sandbox: Sandbox, name: str) -> None:
    sandbox.add_python("python3")
    sandbox.run("quickstart.sh")
    with (sandbox.root / name).open("a") as file:
        file.write("# changed\n")
    assert sandbox.run("quickstart.sh").returncode == 0
    assert len(sandbox.calls("-m pip install")) == 2
    assert len(sandbox.calls("-m venv")) == 1


def test_environment_of_the_tests_serves_quickstart_but_not_the_other_way(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    for script in ("quickstart.sh", "test.sh", "quickstart.sh", "test.sh"):
        assert sandbox.run(script).returncode == 0
    installs = sandbox.calls("-m pip install")
    assert [install.endswith("[test]") for install in installs] == [False, True]


@pytest.mark.parametrize(
    ("version", "extra"),
    [
        ("CUDA Version: 12.8", "cuda12"),
        ("CUDA Version: 13.0", "cuda13"),
        ("CUDA UMD Version: 13.2", "cuda13"),
        ("CUDA Version: 14.1", "cuda13"),
    ],
)
def test_cupy_comes_with_a_driver(sandbox: Sandbox, version: str, extra: str) -> None:
    """And the stamp says so: no script installs again, nor does a later one without nvidia-smi.

    Unless thorough, for one version each is run once more, and for others not.
    """
    sandbox.add_python("python3")
    sandbox.add_nvidia_smi(version)
    scripts = ("quickstart.sh", "quickstart.sh", "test.sh", "quickstart.sh", "test.sh")
    for script in scripts if THOROUGH or version == "CUDA UMD Version: 13.2" else ("quickstart.sh", "test.sh"):
        assert sandbox.run(script).returncode == 0
    (sandbox.path / "nvidia-smi").unlink()
    assert sandbox.run("quickstart.sh").stderr == ""
    first, second = sandbox.calls("-m pip install")
    assert first.endswith(f"{sandbox.root}[{extra}]")
    assert second.endswith(f"{sandbox.root}[test,{extra}]")


@pytest.mark.parametrize(
    ("version", "extra"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "[cuda12]"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)", "[cuda13]"),
        ("NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024", ""),
        ("a new format", ""),
    ],
)
def test_driver_is_known_without_nvidia_smi(sandbox: Sandbox, version: str, extra: str) -> None:
    sandbox.add_python("python3")
    sandbox.driver_file.write_text(f"NVRM version: {version}\nGCC version:  gcc version 12.3.0 (Debian)\n")
    result = sandbox.run("quickstart.sh")
    assert result.returncode == 0
    assert ("without CuPy" in result.stderr) == (not extra)
    (install,) = sandbox.calls("-m pip install")
    assert install.endswith(f" -e {sandbox.root}{extra}")


@pytest.mark.parametrize("version", ["", "CUDA Version: N/A", "CUDA Version: 11.4"])
def test_driver_of_another_or_unreadable_version_is_told_once(sandbox: Sandbox, version: str) -> None:
    sandbox.add_python("python3")
    sandbox.add_nvidia_smi(version)
    result = sandbox.run("test.sh")
    assert result.returncode == 0
    assert "osdp: going on without CuPy: the NVIDIA driver is for CUDA " in result.stderr
    assert "CuPy" not in sandbox.run("test.sh").stderr
    (install,) = sandbox.calls("-m pip install")
    assert install.endswith("[test]")


def test_nvidia_smi_without_a_driver_is_no_driver(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    sandbox.add_nvidia_smi("CUDA Version: 13.0", status=9)
    assert "CuPy" not in sandbox.run("quickstart.sh").stderr
    (install,) = sandbox.calls("-m pip install")
    assert install.endswith(f" -e {sandbox.root}")


def test_what_an_earlier_install_left_is_removed(sandbox: Sandbox) -> None:
    """The distribution was named `osdp` before; two CuPy share their folder."""
    sandbox.add_python("python3")
    for version in ("CUDA Version: 12.8", "CUDA Version: 13.0"):
        sandbox.add_nvidia_smi(version)
        sandbox.run("quickstart.sh")
    removals = sandbox.calls("-m pip --disable-pip-version-check uninstall")
    assert [removal.split("--yes ")[1] for removal in removals] == ["osdp cupy-cuda13x", "osdp cupy-cuda12x"]
    assert len(sandbox.calls("-m pip install")) == 2


def test_moved_checkout_installs_again(sandbox: Sandbox) -> None:
    """The commands and the editable install in .venv name the old place."""
    sandbox.add_python("python3")
    sandbox.run("quickstart.sh")
    moved = sandbox.root.with_name("moved")
    sandbox.root = sandbox.root.rename(moved)
    assert sandbox.run("quickstart.sh").returncode == 0
    assert sandbox.calls("-m pip install")[-1].endswith(f" -e {moved}")


def test_newest_python_that_works_is_taken(sandbox: Sandbox) -> None:
    """As with pyenv, whose commands for versions that are not active exist and fail."""
    sandbox.add_python("python3.13", BROKEN)
    sandbox.add_python("python3.12", NO_ENSUREPIP)
    sandbox.add_python("python3.11")
    sandbox.add_python("python3", OLD)
    assert sandbox.run("quickstart.sh").returncode == 0
    assert "site-bin-python3.11" in (sandbox.venv / "bin" / "python").read_text()


@pytest.mark.parametrize("is_on_path", [True, False])
def test_the_distributions_python_comes_before_others_of_its_version(is_on_path: bool, sandbox: Sandbox) -> None:
    sandbox.add_python("python3.12", NO_ENSUREPIP, distributed=True)
    sandbox.add_python("python3.11", distributed=True)
    sandbox.add_python("python3.11")
    path = os.pathsep.join(map(str, [sandbox.path, *[sandbox.distributed] * is_on_path]))
    assert sandbox.run("quickstart.sh", PATH=path).returncode == 0
    taken = "site-usr-python3.11" if is_on_path else "site-bin-python3.11"
    assert taken in (sandbox.venv / "bin" / "python").read_text()


def test_no_python(sandbox: Sandbox) -> None:
    assert_refused(sandbox.run("quickstart.sh"), "no python3 that runs", "install python3")


def test_old_python(sandbox: Sandbox) -> None:
    sandbox.add_python("python3", OLD)
    assert_refused(sandbox.run("quickstart.sh"), "the python3 on PATH is 3.10.12", "install Python 3.11")
    assert not sandbox.venv.exists()


def test_ensurepip_missing(sandbox: Sandbox) -> None:
    sandbox.add_python("python3", NO_ENSUREPIP)
    assert_refused(sandbox.run("test.sh"), "python3 cannot make virtual", "apt-get install python3-venv")
    assert not sandbox.venv.exists()


def test_terminal_sees_the_progress_of_pip(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    terminal, end = os.openpty()
    command = ["sh", str(sandbox.root / "scripts" / "quickstart.sh")]
    result = subprocess.run(command, env={"PATH": str(sandbox.path)}, stdout=end, stderr=end)
    os.close(end)
    os.close(terminal)
    assert result.returncode == 0
    sandbox.run("test.sh")
    on_terminal, elsewhere = sandbox.calls("-m pip install")
    assert "--quiet" not in on_terminal
    assert "--log" in on_terminal
    assert "--quiet --progress-bar off" in elsewhere


def test_offline(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("quickstart.sh", STUB_PIP="offline")
    assert_refused(result, "offline", "check the network")
    assert "NewConnectionError" in result.stderr


def test_index_switched_off(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("quickstart.sh", STUB_PIP="No matching distribution", PIP_NO_INDEX="1")
    assert_refused(result, "offline", "pip config list")


def test_failed_install_is_tried_again(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("quickstart.sh", STUB_PIP="No space left on device")
    assert_refused(result, "pip could not install", "message of pip")
    assert "ERROR: No space left on device" in result.stderr
    assert "offline" not in result.stderr
    assert sandbox.run("quickstart.sh").returncode == 0
    assert len(sandbox.calls("-m venv")) == 1


def test_failed_upgrade_does_not_count_as_installed(sandbox: Sandbox) -> None:
    """The command of the first install is still there; the stamp must not be."""
    sandbox.add_python("python3")
    sandbox.run("quickstart.sh")
    assert sandbox.run("test.sh", STUB_PIP="broken").returncode == 2
    sandbox.run("quickstart.sh")
    assert len(sandbox.calls("-m pip install")) == 3


@pytest.mark.parametrize("state", ["empty", "dangling python", "no pip"])
def test_half_made_environment_is_made_again(sandbox: Sandbox, state: str) -> None:
    sandbox.add_python("python3")
    (sandbox.venv / "bin").mkdir(parents=True)
    if state == "dangling python":
        (sandbox.venv / "bin" / "python").symlink_to("/nowhere/python3")
    elif state == "no pip":
        shutil.copy(sandbox.path / "python3", sandbox.venv / "bin" / "python")
        (sandbox.venv / "bin" / "no-pip").touch()
    result = sandbox.run("quickstart.sh")
    assert result.returncode == 0
    assert "is not complete: making it again" in result.stderr
    assert len(sandbox.calls("-m venv")) == 1


def test_environment_of_an_old_python_is_left_alone(sandbox: Sandbox) -> None:
    sandbox.add_python("python3", OLD)
    (sandbox.venv / "bin").mkdir(parents=True)
    shutil.copy(sandbox.path / "python3", sandbox.venv / "bin" / "python")
    assert_refused(sandbox.run("quickstart.sh"), ".venv holds Python 3.10.12", "delete or move")
    assert (sandbox.venv / "bin" / "python").exists()


def test_stages_run_in_order(sandbox: Sandbox) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("test.sh", "-k", "one and two")
    assert result.returncode == 0
    pytest_ran = "ran -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=50 -k one and two"
    site_ran = f"ran -m mkdocs build --quiet --strict --site-dir {sandbox.venv}/site"
    lint_ran = ["ran -m ruff check", "ran -m ruff format --check"]
    assert result.stdout.splitlines() == [*lint_ran, site_ran, pytest_ran, "ran -m mypy"]


@pytest.mark.parametrize(("fails", "ran"), [("ruff", 1), ("mkdocs", 3), ("mypy", 5), ("pytest", 5)])
def test_what_fails_is_named_and_nothing_badly_formed_is_tested(sandbox: Sandbox, fails: str, ran: int) -> None:
    sandbox.add_python("python3")
    result = sandbox.run("test.sh", STUB_FAILS=fails)
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) == ran
    assert result.stderr.splitlines()[-1].startswith(f"osdp: failed: {fails}")


def test_another_torch_has_an_environment_of_its_own(sandbox: Sandbox) -> None:
    """And the tests run in it, with neither lint nor types."""
    sandbox.add_python("python3")
    sandbox.run("test.sh")
    result = sandbox.run("test.sh", "--torch", "2.11", "-k", "one and two")
    assert result.returncode == 0
    (ran,) = result.stdout.splitlines()
    assert ran == "ran -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=50 -k one and two"
    venv = sandbox.root / ".venv-torch-2.11"
    first, second = sandbox.calls("-m pip install")
    assert "/.venv/" not in second
    assert second.endswith(f" -c {venv}/constraints.txt -e {sandbox.root}[test]")
    pinned = (sandbox.root / "constraints.txt").read_text()
    assert (venv / "constraints.txt").read_text() == pinned.replace("torch==2.13.0", "torch==2.11.*")
    for arguments in ((), ("--torch", "2.11")):
        assert sandbox.run("test.sh", *arguments).returncode == 0
    assert sandbox.calls("-m pip install") == [first, second]


@pytest.mark.parametrize("version", ["", "newest", "-k"])
def test_a_torch_that_is_no_version(sandbox: Sandbox, version: str) -> None:
    assert_refused(sandbox.run("test.sh", "--torch", version), "a version of PyTorch", "--torch 2.11")
