"""The loop: batch -> loss -> backward -> clip -> optimizer step, M micro-batches to a step.

Sample numbers of a step are divided among micro-batches and ranks in order:

    number = position + (m * world_size + rank) * b + i,    i < b

so all ranks together take the samples [position, position + M * world_size * b), however many they are.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from osdp.api import OSDP
from osdp.training.finite import ADVICE, NonFinite, are_finite
from osdp.training.job import Job
from osdp.training.lr_schedule import learning_rate
from osdp.training.measure import Measurements
from osdp.training.process_group import Ranks
from osdp.training.progress import Progress
from osdp.training.reporters import Counted, Report, Saved, Skipped, Step
from osdp.training.tasks import batch
from osdp.training.trace_step import MEMORY_STEP, TRACE_STEP, Tracer
from osdp.training.viewer_files import StepRecorder
from osdp.training.waiting import Stalls
from profiler.errors import OsdpError
from runtime.failures.peer_faults import check_finite, naming_faults
from runtime.local_shards import local_data
from runtime.state import checkpoint


@dataclass
class Position:
    """How far a run is."""

    step: int = 0
    sample: int = 0
    """Samples that all ranks together have taken."""


class Trainer:
    """One model in training on this rank."""

    def __init__(self, job: Job, model: OSDP, optimizer: Optimizer, ranks: Ranks, report: Report) -> None:
        self.job, self.config, self.plan = job, job.config, model.plan
        self.model, self.optimizer, self.ranks, self.report = model, optimizer, ranks, report
        self.position, self.progress = Position(), Progress()
        self.nonfinite = NonFinite(job.config.on_nonfinite == "skip", job.config.nonfinite_limit)
        self.resumed: Path | None = None
        """The checkpoint that the run continues from."""
        self._saving: checkpoint.Saving | None = None

    @property
    def samples_per_step(self) -> int:
        return self.ranks.world_size * self.plan.micro_batch * self.plan.accumulation

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. Raises OsdpError if it is not of this model and this data."""
        extra = self.model.load_checkpoint(path, self.optimizer)
        known, here = extra.get("data"), self.job.task.identity()
        if known != here:
            advice = "the options of that run, or another --checkpoint"
            raise OsdpError(f"{path} is of a run with other data", got=str(known), expected=str(here), advice=advice)
        self.position, self.resumed = Position(extra["step"], extra["sample"]), path

    def is_finite(self) -> bool:
        """Whether all weights are. A collective call."""
        return are_finite((local_data(shard.parameter) for shard in self.model.sharded.local_shards), self.ranks)

    def run(self) -> Measurements:
        """Train until the configuration's last step; return what was measured."""
        config = self.config
        stalls = Stalls(self.ranks.device, self.model.sharded)
        steps_left, by_part = config.steps - self.position.step, config.html is not None
        measured = Measurements(self.ranks, steps_left, stalls, by_part=by_part)
        tracer = Tracer(config.trace, self.model, self.optimizer)
        recorder = StepRecorder(config.memory_snapshot, config.timeline, self.ranks.device, self.ranks.rank)
        self.model.train()
        self.progress.begin(self.position.step)
        while self.position.step < config.steps:
            rate = learning_rate(config, self.position.step)
            what, timing = f"step {self.position.step + 1}", measured.step(self.model, self.optimizer)
            with naming_faults(what, config.timeout_s), timing, tracer.step(), recorder.step():
                if tracer.slows or recorder.slows:
                    measured.leave_out()
                loss, norm = self._step(rate)
            self.position.step += 1
            self.position.sample += self.samples_per_step
            self.progress.done(self.position.step)
            with naming_faults(f"reporting step {self.position.step}", config.timeout_s):
                self._report_step(loss, norm, rate, measured)
            if config.checkpoint and self.position.step % config.checkpoint_every == 0:
                self._save()
        if config.checkpoint and self.position.step % config.checkpoint_every and measured.count:
            self._save()
        self._await_save()
        if config.trace is not None and tracer.steps < TRACE_STEP:
            recorded = f"--trace records steps {MEMORY_STEP} and {TRACE_STEP} of a run"
            warnings.warn(f"only {tracer.steps} steps were left: {recorded}", stacklevel=2)
        if measured.count < recorder.last_step:
            recorded = f"step {recorder.last_step} of a run is recorded"
            warnings.warn(f"only {measured.count} steps were left: {recorded}", stacklevel=2)
        return measured

    def _step(self, rate: float) -> tuple[Tensor, Tensor | None]:
        """Run one optimizer step; return this rank's mean loss and the norm of all gradients."""
        config, micro_batches = self.config, self.plan.accumulation
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Dropout depends on seed, step and rank alone, so that a resumed run continues alike.
        words = np.random.SeedSequence([config.seed, self.position.step, self.ranks.rank]).generate_state(1)
        torch.manual_seed(int(words[0]))
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.ranks.device)
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with nullcontext() if is_last else self.model.no_sync():
                loss = self._loss(micro_batch) / micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        number = self.position.step + 1
        if config.on_nonfinite == "stop":
            check_finite(total, number)
        norm = self.model.grad_norm() if config.clip is None else self.model.clip_grad_norm_(config.clip)
        if self.nonfinite.leaves_out(bool(torch.isfinite(norm)), number):
            self.optimizer.zero_grad()
            self.report(Skipped(number))
        else:
            self.optimizer.step()
        return total, None if config.clip is None else norm

    def _loss(self, micro_batch: int) -> Tensor:
        """Return the loss of this rank's samples of a micro-batch."""
        size = self.plan.micro_batch
        first = self.position.sample + (micro_batch * self.ranks.world_size + self.ranks.rank) * size
        tokens, keywords = self.ranks.tensors(batch(self.job.task, range(first, first + size)))
        output: Any = self.model(tokens, **keywords)
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(found, Tensor) or found.numel() != 1:
            expected = "a scalar tensor, or an object with `loss`, when it is given labels"
            raise OsdpError("the model returns no loss", got=type(output).__name__, expected=expected)
        return found

    def _report_step(self, loss: Tensor, norm: Tensor | None, rate: float, measured: Measurements) -> None:
        number = self.position.step
        if number % self.config.log_every and number != self.config.steps and measured.count != 1:
            return
        mean, gradient_norm = self.ranks.mean(loss), None if norm is None else float(norm)
        samples, tokens = self.samples_per_step, self.samples_per_step * self.job.task.sequence_length
        step_s, recent = measured.recent_s(), measured.recent()
        left_s = step_s * (self.config.steps - number)
        if measured.parts:
            self.report(Counted(measured.parts))
            measured.parts = ()
        figures = mean, gradient_norm, rate, samples, tokens, step_s, recent.peak_bytes, left_s, recent.waits_s
        self.report(Step(number, *figures))

    def _save(self) -> None:
        """Write a checkpoint, or begin to; older ones go when it is whole."""
        with naming_faults(f"saving the checkpoint of step {self.position.step}", self.config.timeout_s):
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        self._await_save()
        path = Path(self.config.checkpoint or "") / f"step-{self.position.step:06d}"
        if not self.is_finite():
            what = f"the weights are not finite after step {self.position.step}, so they are not saved"
            raise OsdpError(what, advice=f"{ADVICE}; checkpoints from before are as they were")
        extra = {"step": self.position.step, "sample": self.position.sample, "data": self.job.task.identity()}
        extra["samples_per_step"] = self.samples_per_step
        asynchronous = self.config.checkpoint_async
        self._saving = self.model.save_checkpoint(path, self.optimizer, extra, asynchronous=asynchronous)
        if not asynchronous:
            self._await_save()

    def _await_save(self) -> None:
        """Wait until the checkpoint that is being written is whole."""
        if self._saving is None:
            return
        self._saving.wait()
        saved, self._saving = self._saving.path, None
        self.progress.saved(saved)
        if self.ranks.rank == 0:
            checkpoint.prune(saved.parent, self.config.checkpoint_keep)
        self.report(Saved(saved))
