"""Batches of samples of uneven length that cost all ranks about the same.

An epoch is cut into steps, and a step into micro-batches of ranks, with N ranks, M micro-batches and b samples in each:

    order of the samples      a permutation by (seed, epoch), or as they come
    samples of a step         the next N M b of them, so that what a step trains does not depend on lengths
    micro-batches of a rank   `planner.cost.balanced_sets.split_step` by the samples' costs

Each rank computes the whole split of a step from the same numbers, and takes its own part: nothing is communicated.
What remains after the last whole step is left out (`drop_last`), or filled up from the start of the order to a
multiple of N, as DistributedSampler does, and split into fewer micro-batches, the last of fewer samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from planner.cost.balanced_sets import METHODS, split_step
from profiler.errors import OsdpError


class BalancedBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for `torch.utils.data.DataLoader`: yields this rank's batches of one epoch.

    All ranks get equally many, and each sample is in one batch of one rank (but for what fills up the last step).

    Args:
        lengths: of each sample of the dataset, in tokens or any other unit; positive.
        batch_size: samples in each micro-batch; with `equal_sizes=False`, in the mean one.
        accumulation: micro-batches of each rank in an optimizer step; the more, the better they can be balanced.
        cost: gives what a sample of some length costs, in any unit, such as `osdp.uneven_lengths.packing.Cost`;
            by default a sample costs its length.
        method: `karmarkar_karp` or `greedy`.
        equal_sizes: whether all micro-batches have `batch_size` samples. If not, they are balanced better, a mean loss
            of each is no longer that of the step (`osdp.uneven_lengths.packing.weights`), and one of short samples
            holds more of them than `batch_size`.
        num_replicas, rank: by default those of the process group, if there is one, else one rank.
        shuffle, seed, drop_last: as for `torch.utils.data.DistributedSampler`, but that `drop_last` leaves out all that
            does not fill a step.

    Raises:
        OsdpError: for arguments that cannot be, and if there is no batch in an epoch.
    """

    def __init__(
        self,
        lengths: Sequence[float],
        batch_size: int,
        accumulation: int = 1,
        *,
        cost: Callable[[int], float] | None = None,
        method: str = "karmarkar_karp",
        equal_sizes: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.ranks = num_replicas if num_replicas is not None else dist.get_world_size() if grouped else 1
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.batch_size, self.accumulation = batch_size, accumulation
        self.method, self.equal_sizes = method, equal_sizes
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._check()
        self.costs = _costs(lengths, cost)
        self.epoch = 0
        self._steps = self._cut_epoch()
        self._first, self._taken = 0, 0
        """Where the next pass over the epoch begins, and how many batches this one has yielded; from 0."""

    def _check(self) -> None:
        counts = {"batch_size": self.batch_size, "accumulation": self.accumulation, "num_replicas": self.ranks}
        for name, value in counts.items():
            _check_count(name, value, 1)
        _check_count("seed", self.seed, 0)
        if not 0 <= self.rank < self.ranks:
            expected = f"0 to {self.ranks - 1}, as there are {self.ranks} ranks"
            raise OsdpError("rank of balanced batches is wrong", got=str(self.rank), expected=expected)
        if self.method not in METHODS:
            what = "there is no such method of balancing"
            raise OsdpError(what, got=str(self.method), expected=" or ".join(METHODS))

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a step."""
        return self.ranks * self.accumulation * self.batch_size

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch; all ranks have as many."""
        return sum(micro_batches for micro_batches, _ in self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, each a list of indices, from where `load_state_dict` left off."""
        first, self._first = self._first, 0
        self._taken = first
        order, start, number = self._order(), 0, 0
        for micro_batches, size in self._steps:
            samples = order[start : start + self.ranks * micro_batches * size]
            start, number = start + len(samples), number + micro_batches
            if number <= first:
                continue
            batches = self._split(samples, micro_batches)
            for batch in batches[max(0, first - number + micro_batches) :]:
                self._taken += 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and so the order of its samples; the one that there is keeps what was loaded."""
        _check_count("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._first, self._taken = epoch, 0, 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the place in the epoch, as plain data, the same on all ranks.

        `batches` are those of this epoch that the loop has trained on, by default those that were yielded. A DataLoader
        with workers takes batches ahead of the loop: say there how many were trained on.
        """
        batch = self._taken if batches is None else batches
        _check_count("batches", batch, 0, len(self))
        return {
            "epoch": self.epoch,
            "batch": batch,
            "of": len(self),
            **self._order_settings(),
            **self._split_settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Between two steps the number of ranks, the batch size, costs and method may be others than then, if the global
        batch is not. Raises OsdpError for a state that does not belong to this sampler's epochs.
        """
        needed = {"epoch", "batch", "of", *self._order_settings(), *self._split_settings()}
        if missing := sorted(needed.difference(state)):
            raise OsdpError("this is no state of balanced batches", got=f"nothing for {', '.join(missing)}")
        for name, own in self._order_settings().items():
            if state[name] != own:
                what = f"the state of balanced batches has another {name}"
                advice = "make the sampler as it was when the state was saved"
                raise OsdpError(what, got=str(state[name]), expected=str(own), advice=advice)
        for name, least in (("epoch", 0), ("accumulation", 1), ("of", 0)):
            _check_count(name, state[name], least)
        _check_count("batch", state["batch"], 0, state["of"])
        self._first = self._taken = self._batch_of(state)
        self.epoch = state["epoch"]

    def _batch_of(self, state: Mapping[str, Any]) -> int:
        """Return the number of batches that were taken, in batches of this sampler."""
        batch: int = state["batch"]
        accumulation: int = state["accumulation"]
        if all(state[name] == own for name, own in self._split_settings().items()):
            return batch
        if batch == state["of"]:
            return len(self)
        steps, within = divmod(batch, accumulation)
        if within or steps > len(self.costs) // self.global_batch:
            what = "batches that were balanced otherwise can only be resumed between two whole steps"
            expected = f"a multiple of {accumulation}, or the settings from when the state was saved"
            raise OsdpError(what, got=f"batch {batch} of the epoch", expected=expected)
        return steps * self.accumulation

    def _order_settings(self) -> dict[str, Any]:
        """Return what says which samples a step has."""
        found = {"samples": len(self.costs), "global_batch": self.global_batch}
        return {**found, "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last}

    def _split_settings(self) -> dict[str, Any]:
        """Return what says how a step is split."""
        found = {"ranks": self.ranks, "accumulation": self.accumulation, "method": self.method}
        return {**found, "equal_sizes": self.equal_sizes, "costs": zlib.crc32(self.costs.tobytes())}

    def _cut_epoch(self) -> list[tuple[int, int]]:
        """Return the micro-batches of each rank and the samples of each of them, of every step."""
        whole, rest = divmod(len(self.costs), self.global_batch)
        steps = [(self.accumulation, self.batch_size)] * whole
        if not self.drop_last:
            micro_batches, more = divmod(-(-rest // self.ranks), self.batch_size)
            steps += [(micro_batches, self.batch_size)] * (micro_batches > 0) + [(1, more)] * (more > 0)
        if not steps:
            got, advice = f"{len(self.costs)} samples", "drop_last=False, or a smaller batch"
            expected = f"at least {self.global_batch}, the global batch"
            raise OsdpError("an epoch has no step that is filled", got=got, expected=expected, advice=advice)
        return steps

    def _order(self) -> NDArray[np.intp]:
        """Return the samples of an epoch in their order, filled up from its start."""
        count = len(self.costs)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(count) if self.shuffle else np.arange(count)
        return np.resize(order, self.ranks * sum(micro_batches * size for micro_batches, size in self._steps))

    def _split(self, samples: NDArray[np.intp], micro_batches: int) -> list[list[int]]:
        """Return this rank's batches of a step."""
        costs, split = self.costs[samples].tolist(), METHODS[self.method]
        own = split_step(costs, self.ranks, micro_batches, split, self.equal_sizes)[self.rank]
        return [samples[list(batch)].tolist() for batch in own]


def _check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise OsdpError for what is no whole number, or out of range."""
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        expected = f"a whole number, at least {least}" + (f" and at most {most}" if most is not None else "")
        raise OsdpError(f"{name} of balanced batches is wrong", got=repr(value), expected=expected)


def _costs(lengths: Sequence[float], cost: Callable[[int], float] | None) -> NDArray[np.float64]:
    """Return the cost of each sample; raises OsdpError for what is not positive and finite."""
    values, positions = np.unique(np.asarray(lengths), return_inverse=True)
    if not len(values):
        raise OsdpError("there are no samples to balance", got="no lengths", expected="one for each sample")
    of_values = np.asarray(values if cost is None else [cost(value) for value in values.tolist()], dtype=np.float64)
    for value, found in zip(values.tolist(), of_values.tolist(), strict=True):
        if not 0 < value < np.inf or not 0 < found < np.inf:
            got = f"{found} for a sample of length {value}"
            raise OsdpError("samples cannot be balanced by this cost", got=got, expected="positive and finite numbers")
    return of_values[positions]
