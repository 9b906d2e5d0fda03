"""One rank of a run: joins the others, takes the plan, builds its part of the model, trains, sums up."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from osdp.api import OSDP
from osdp.planning.clusters import allocatable_bytes
from osdp.planning.rank_grid import cluster_of_plan
from osdp.training.agreement import check_alike
from osdp.training.choose_plan import choose_plan
from osdp.training.evaluate import held_out_accuracies
from osdp.training.job import Job
from osdp.training.loop import Trainer
from osdp.training.measure import Measurements
from osdp.training.process_group import Ranks, joined
from osdp.training.progress import rounds
from osdp.training.reporters import Event, Report, Reporter, Start, Summary
from planner.plan import Plan
from profiler.errors import OsdpError
from runtime.failures.rank_agreement import Agreement, from_rank_0
from runtime.optimizers import OPTIMIZERS
from runtime.own_gpu import keep_within
from runtime.state.checkpoint_files import latest, whole_steps
from runtime.state.folder_lease import leased

ENDING_S = 60.0
"""How long a restart waits for what is left of the ranks before it to give up the folder of checkpoints."""


def run_rank(job: Job, *reporters: Reporter) -> None:
    """Train on this rank, which torchrun or `osdp.training.launch` started; rank 0 reports. Raises OsdpError."""
    with joined(job.device, job.config.timeout_s) as ranks:

        def report(event: Event) -> None:
            for reporter in reporters if ranks.rank == 0 else ():
                reporter.report(event)

        # First: while another job writes there, ranks find different checkpoints to resume.
        with _own_checkpoints(job, ranks):
            check_alike(job)
            _train(job, ranks, report)


def _train(job: Job, ranks: Ranks, report: Report) -> None:
    plan, planned_s = from_rank_0("plan", lambda: choose_plan(job))
    limit_bytes = None
    if job.device == "cuda" and job.config.fsdp_type == "OSDP":
        limit_bytes = allocatable_bytes(cluster_of_plan(plan, None), plan.limit_bytes)
        keep_within(limit_bytes, ranks.device)
    trainer = _trainer(job, plan, ranks, report)
    if limit_bytes is not None:
        beside_bytes = sum(unit.bytes_beside_allocator for unit in trainer.model.sharded.units)
        keep_within(limit_bytes - beside_bytes, ranks.device)
    report(Start(plan, job.config, planned_s, job.device, trainer.position.step, trainer.resumed, rounds()))
    report(_summary(trainer, trainer.run()))


def _trainer(job: Job, plan: Plan, ranks: Ranks, report: Report) -> Trainer:
    """Build the model under the plan, and load the checkpoint that the job continues from."""
    source, config = job.source, job.config
    torch.manual_seed(config.seed)
    model = OSDP(source.build, plan, example_inputs=lambda batch: source.example_inputs(job.without_data, batch))
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    trainer = Trainer(job, model, optimizer, ranks, report)
    for path in _candidates(job):
        trainer.resume(path)
        if trainer.is_finite():
            return trainer
        if config.resume != "auto":
            raise OsdpError(f"the weights in {path} are not finite", advice="--resume auto, or an earlier checkpoint")
        if ranks.rank == 0:
            warnings.warn(f"the weights in {path} are not finite: an earlier checkpoint is taken", stacklevel=2)
    if job.resume is not None:
        what = f"no checkpoint in {job.resume.parent} has finite weights"
        raise OsdpError(what, advice="another --checkpoint to start anew")
    return trainer


def _candidates(job: Job) -> list[Path]:
    """Return the checkpoints that a run may continue from, the best first."""
    if job.resume is None:
        return []
    return [job.resume] if job.config.resume != "auto" else whole_steps(job.resume.parent)


@contextmanager
def _own_checkpoints(job: Job, ranks: Ranks) -> Iterator[None]:
    """Keep other jobs out of the folder of checkpoints meanwhile. Collective; raises OsdpError on all ranks."""
    folder = Path(job.config.checkpoint) if job.config.checkpoint else None
    with ExitStack() as held:

        def take() -> None:
            if folder is None:
                return
            # Ranks of the last round may be ending yet on another node.
            patience_s = ENDING_S if rounds() else 0.0
            held.enter_context(leased(folder, f"trains {job.config.model}", patience_s=patience_s))
            if job.config.resume == "auto" and latest(folder) != job.resume:
                what = f"another job has written to {folder} while this one started"
                raise OsdpError(what, advice="start again: --resume auto continues from what is there now")

        Agreement.all().on_first(f"take {folder}", take)
        yield


def _summary(trainer: Trainer, measured: Measurements) -> Summary:
    """Sum up, with the accuracy on held-out samples. A collective call."""
    task, step_s, (memory, waits_s) = trainer.job.task, measured.step_s, measured.whole()
    accuracies = held_out_accuracies(trainer.model, task, trainer.ranks, trainer.plan.micro_batch)
    samples_per_s = trainer.samples_per_step / step_s if step_s else 0.0
    timed_steps, tokens_per_s = len(measured.timed_s), samples_per_s * task.sequence_length
    rates = samples_per_s, tokens_per_s
    skipped = trainer.nonfinite.skipped
    restarts = trainer.progress.restarts()
    run = trainer.plan, measured.count, timed_steps, step_s, *rates, memory, accuracies
    return Summary(*run, skipped, restarts, waits_s)
