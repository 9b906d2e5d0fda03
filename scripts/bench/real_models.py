"""Do real models train as in one process?  `python scripts/bench/real_models.py [--models ...] [--output FILE]`

Small models of many architectures (`tests/small_models.py`: of transformers, with adapters of peft, of torch's layers),
seeded, without dropout, train for three steps of Adam on gloo ranks under

    plan        what the search finds with as much memory as a uniform plan needs at least, made shard by shard
    shard       every operator `shard`
    mixture     a random strategy for every operator, linear layers cut in two here and there
    recompute   another mixture, with every block recomputed
    bf16        another one in bf16, without cut layers, with every block recomputed

and are compared with plain PyTorch in one process, which averages the gradients of all ranks' batches; for bf16 it
computes in bf16 with fp32 parameters (`tests/real_training.py`).  The table has the largest difference of any parameter
or buffer; what OSDP refuses, and what fails, is below it in its words.
"""

import argparse
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _shared as bench

sys.path.insert(0, str(bench.ROOT / "tests"))
os.environ["OSDP_TEST_THOROUGH"] = "1"  # three steps, here and in the ranks; tests take two
os.environ["PYTHONPATH"] = os.pathsep.join([str(bench.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Train what is asked for and write the table."""
    from real_training import GRIDS, KINDS, Row, train_on_ranks
    from small_models import MODELS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="beginnings of names; default: all")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--ranks", nargs="*", type=int, default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--output", type=Path, help="file for the table, beside the terminal")
    options = parser.parse_args()
    names = [name for name in MODELS if name.startswith(tuple(options.models))]
    if not names:
        parser.error(f"no model begins with {', '.join(options.models)}: known are {', '.join(MODELS)}")
    rows = dict[tuple[str, str, int], Row]()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(name, kind) for name in names for kind in options.kinds]
            rows |= {(row.model, row.kind, ranks): row for row in train_on_ranks(ranks, jobs, Path(folder))}
    text = "\n".join(
        [f"{bench.machine()}, transformers {version('transformers')}, gloo", "", *table(options, names, rows)]
    )
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n")


def table(options: argparse.Namespace, names: list[str], rows: dict[Any, Any]) -> list[str]:
    """Return the lines of the table, and what was refused or failed below it."""
    columns = [(kind, ranks) for ranks in options.ranks for kind in options.kinds]
    lines = [
        f"| model | {' | '.join(f'{kind}, {ranks} ranks' for kind, ranks in columns)} |",
        "|---" * len(columns) + "|---|",
    ]
    below = []
    for name in names:
        cells = []
        for column in columns:
            row = rows[name, *column]
            words = row.refused or row.failed.strip().splitlines()[-1] if row.refused or row.failed else ""
            cells.append("refused" if row.refused else "**failed**" if row.failed else f"{row.difference:.0g}")
            if words and words not in below:
                below += [f"{name}, {column[0]}, {column[1]} ranks:", words]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, *(["", "```text", *below, "```"] if below else [])]


if __name__ == "__main__":
    main()
