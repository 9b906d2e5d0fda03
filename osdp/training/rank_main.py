"""One rank of a run: joins the others, takes the plan, builds its part of the model, trains, sums up."""

import torch

from osdp.api import OSDP
from osdp.planning.clusters import allocatable_bytes
from osdp.planning.rank_grid import cluster_of_plan
from osdp.training.choose_plan import choose_plan
from osdp.training.evaluate import held_out_accuracies
from osdp.training.job import Job
from osdp.training.loop import Trainer
from osdp.training.measure import Measurements
from osdp.training.process_group import Ranks, joined
from osdp.training.reporters import Event, Report, Reporter, Start, Summary
from planner.plan import Plan
from runtime.failures.rank_agreement import from_rank_0
from runtime.optimizers import OPTIMIZERS
from runtime.own_gpu import keep_within


def run_rank(job: Job, *reporters: Reporter) -> None:
    """Train on this rank, which torchrun or `osdp.training.launch` started; rank 0 reports. Raises OsdpError."""
    with joined(job.device, job.config.timeout_s) as ranks:

        def report(event: Event) -> None:
            for reporter in reporters if ranks.rank == 0 else ():
                reporter.report(event)

        plan, planned_s = from_rank_0("plan", lambda: choose_plan(job))
        limit_bytes = None
        if job.device == "cuda" and job.config.fsdp_type == "OSDP":
            limit_bytes = allocatable_bytes(cluster_of_plan(plan, None), plan.limit_bytes)
            keep_within(limit_bytes, ranks.device)
        trainer = _trainer(job, plan, ranks, report)
        if limit_bytes is not None:
            beside_bytes = sum(unit.bytes_beside_allocator for unit in trainer.model.sharded.units)
            keep_within(limit_bytes - beside_bytes, ranks.device)
        report(Start(plan, job.config, planned_s, job.device, trainer.position.step, job.resume))
        report(_summary(trainer, trainer.run()))


def _trainer(job: Job, plan: Plan, ranks: Ranks, report: Report) -> Trainer:
    """Build the model under the plan, and load the checkpoint that the job continues from."""
    source, config = job.source, job.config
    torch.manual_seed(config.seed)
    model = OSDP(source.build, plan, example_inputs=lambda batch: source.example_inputs(job.without_data, batch))
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    trainer = Trainer(job, model, optimizer, ranks, report)
    if job.resume is not None:
        trainer.resume(job.resume)
    return trainer


def _summary(trainer: Trainer, measured: Measurements) -> Summary:
    """Sum up, with the accuracy on held-out samples. A collective call."""
    task, step_s, memory = trainer.job.task, measured.step_s, measured.memory()
    accuracies = held_out_accuracies(trainer.model, task, trainer.ranks, trainer.plan.micro_batch)
    samples_per_s = trainer.samples_per_step / step_s if step_s else 0.0
    timed_steps, tokens_per_s = len(measured.timed_s), samples_per_s * task.sequence_length
    return Summary(trainer.plan, measured.count, timed_steps, step_s, samples_per_s, tokens_per_s, memory, accuracies)
