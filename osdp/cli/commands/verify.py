"""`osdp verify`."""

import os
import shlex
from typing import Annotated, Literal

from typer import Option

from osdp.cli.exits import FAULT, guarded
from osdp.cli.options import AsJson, ClusterOfPlan, ExpertImbalanceOfPlan, Html, ModelOfPlan, PlanPath, Quiet
from osdp.cli.terminal import note, progress_bar, show


@guarded
def verify(
    path: PlanPath,
    model: ModelOfPlan = None,
    cluster: ClusterOfPlan = None,
    device: Annotated[
        Literal["auto", "fake", "cuda"],
        Option(
            help="fake: one rank's step on fake tensors, without computing; cuda: steps on GPUs, under torchrun with "
            "as many ranks as the plan has; auto: cuda if possible, else fake."
        ),
    ] = "auto",
    expert_imbalance: ExpertImbalanceOfPlan = None,
    html: Html = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check a plan's predicted memory. Compares it with a step of the runtime; exits with 1 if it is too far off."""
    if html is not None:
        from osdp.report.render import check_html

        check_html(html)
    from osdp.training.allocator_settings import use_expandable_segments

    use_expandable_segments()
    from osdp.cli.reports.verify import print_verified, verified_object
    from osdp.planning.plan_file import read_plan, reopen
    from osdp.planning.verify import verify as run

    with progress_bar() as progress:
        found = read_plan(path)
        progress(f"tracing {found.model.name}", 0.0)
        view = reopen(found, model, cluster)
        progress(f"a training step of one of {view.load.cluster.world_size} ranks", 0.3)
        verified = run(view, model, None if device == "auto" else device == "cuda", expert_imbalance)
    if os.environ.get("RANK", "0") == "0":
        if html is not None:
            from osdp import __version__
            from osdp.report.contents import verified_report
            from osdp.report.render import write_report

            how = f"Made by osdp {__version__}.\n{shlex.join(['osdp', 'verify', str(path)])}"
            write_report(html, verified_report(view, verified, how))
            note(f"report written to {html}")
        show(as_json, verified_object, print_verified, verified, view.plan)
    if not verified.holds:
        raise SystemExit(FAULT)
