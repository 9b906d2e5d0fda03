"""`osdp export`."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from osdp.cli.exits import guarded
from osdp.cli.options import ClusterOfPlan, ModelOfPlan, PlanPath, Quiet
from osdp.cli.terminal import progress_bar
from osdp.plain_text import plain

TO_HELP = (
    "fsdp2: a Python module that imports torch alone. transformers: fsdp_config of its Trainer. accelerate: the file "
    "that `accelerate launch` reads. deepspeed: its file. torchtitan: sections of its file."
)


@guarded
def export(
    path: PlanPath,
    to: Annotated[str, Option("--to", metavar="FORMAT", help=TO_HELP)],
    output: Annotated[Path | None, Option("--output", "-o", help="Write to this file. Default: print it.")] = None,
    nearest: Annotated[
        bool, Option("--nearest", help="Replace what the format cannot do by the nearest, with its predicted cost.")
    ] = False,
    model: ModelOfPlan = None,
    cluster: ClusterOfPlan = None,
    quiet: Quiet = False,
) -> None:
    """Compile a plan to code. Prints what runs it without OSDP, in the form that another library reads."""
    from osdp.export.formats import check_format, exported
    from osdp.planning.plan_file import read_plan, reopen
    from profiler.yaml_files import write_text_atomic

    check_format(to)
    with progress_bar() as progress:
        found = read_plan(path)
        progress(f"tracing {found.model.name}", 0.0)
        made = exported(reopen(found, model, cluster), to, nearest=nearest)
    if output is None:
        print(made.text, end="")
    else:
        write_text_atomic(output, made.text)
    for line in made.remarks:
        print(plain(line), file=sys.stderr)
