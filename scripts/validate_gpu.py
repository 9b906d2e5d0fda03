"""Check and measure OSDP on this machine's GPUs: `python scripts/validate_gpu.py [--only N ...] [--long] [--cpu]`

Each check runs in a process of its own and within its time; those that time nothing run at once on a machine with many
cores and much GPU memory.  After each, `validate-gpu.json` and `validate-gpu.md` are written anew to --output;
`check-N.log` there holds all that check N printed.  Exits with 1 if any check failed, with 2 if there is no GPU
or something is missing.
`--cpu` runs all of them without one: gloo ranks, small models, and kernels on CPU threads; then speeds are written down
and not judged.  What the tests need, they need too: `sh scripts/test.sh` or `pip install -e '.[test]'`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT)]  # so that it runs from a clone

from validation.check import Check, Finding, Place, skipped  # noqa: E402
from validation.checks import CHECKS  # noqa: E402
from validation.machine import describe, has_room, visible_gpus  # noqa: E402
from validation.processes import end_commands, end_when_asked, run_check, write_finding  # noqa: E402
from validation.report import outcome, write_report  # noqa: E402


def main() -> int:
    """Parse the command line and run the checks, or be one of them."""
    options = parse()
    missing = [name for name in ("pytest", "xdist", "hypothesis") if find_spec(name) is None]
    if missing:
        print(
            f"osdp: {sys.executable} has no {', '.join(missing)}, which some checks run\n"
            "  try: pip install -e '.[test]', or sh scripts/test.sh, which makes .venv with it",
            file=sys.stderr,
        )
        return 2
    place = Place("cpu" if options.cpu else "cuda", options.long, options.scratch)
    by_number = {check.number: check for check in CHECKS}
    end_when_asked()
    if options.as_check:
        write_finding(by_number[options.as_check].run(place), options.finding)
        return 0
    if not options.cpu and not visible_gpus():
        print("osdp: PyTorch finds no GPU\n  try: --cpu, which runs the checks without one", file=sys.stderr)
        return 2
    chosen = [by_number[number] for number in options.only] if options.only else CHECKS
    options.output.mkdir(parents=True, exist_ok=True)
    found = run_all(chosen, place, options.output)
    return 1 if any(one.passed is False for one in found.values()) else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = [check.number for check in CHECKS]
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="run these checks alone")
    parser.add_argument("--long", action="store_true", help="draw more, repeat more often: an hour in place of minutes")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, which tests the checks themselves")
    parser.add_argument("--output", type=Path, default=Path("."), metavar="FOLDER", help="of the report (default .)")
    parser.add_argument("--as-check", type=int, choices=numbers, help=argparse.SUPPRESS)
    parser.add_argument("--finding", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=Path("."), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(chosen: Sequence[Check], place: Place, output: Path) -> dict[int, Finding]:
    """Run checks, those that time nothing at once where there is room; write the report after each."""
    machine, found = describe(place), dict[int, Finding]()

    def note(check: Check, one: Finding) -> None:
        found[check.number] = one
        try:
            write_report(output, machine, chosen, found)
        except OSError as error:
            print(f"osdp: the report could not be written: {error}", file=sys.stderr, flush=True)
        print(f"{check.number:2d} {check.title}: {outcome(one)} ({one.seconds:.1f} s) {one.told}", flush=True)

    together = [check for check in chosen if check.times_nothing] if has_room(place) else []
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        try:
            begun = {pool.submit(run_one, check, place, output): check for check in together}
            for ended in as_completed(begun):
                note(begun[ended], ended.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_commands()
            raise
    for check in chosen:
        if check.number not in found:
            note(check, run_one(check, place, output))
    return found


def run_one(check: Check, place: Place, output: Path) -> Finding:
    """Run a check in a folder of its own, if there are the GPUs that it needs; if that fails, others still run."""
    if check.gpus > visible_gpus() and not place.is_dry:
        return skipped(f"it needs {check.gpus} GPUs, and there is one")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            own = Place(place.device, place.is_long, Path(folder))
            return run_check(check, own, output / f"check-{check.number}.log")
    except Exception as error:
        return Finding(False, f"it could not be run: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
