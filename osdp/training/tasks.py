"""Training tasks: samples of tokens that depend on nothing but the seed and their index.

Any rank can make any sample, so the order of samples is the same for every number of ranks, and a
run resumes at the sample where it stopped, given one number.

Sample g of a task comes from a Philox generator (Salmon et al., 2011) whose key is the seed and
whose counter is g.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from profiler.errors import OsdpError

IGNORED = -100
"""Label that adds nothing to the loss; PyTorch's default."""
Tokens = npt.NDArray[np.int64]
Sample = tuple[Tokens, dict[str, Tokens]]
"""What a model's forward gets: the tokens, and by name `labels` and whatever else a task has."""

TRAINING, HELD_OUT = 0, 1
"""Second word of the generator's key."""
_HELD_OUT_SHARE = 0.1
_LOOKED_AT_BYTES = 1 << 20
"""How much of a file is read to distinguish text from binary data."""


class Task(Protocol):
    """A source of samples."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    @property
    def vocabulary_size(self) -> int:
        """Tokens are less than this."""

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""

    def sample(self, index: int) -> Sample:
        """Return sample `index`; `labels` are unshifted, IGNORED where nothing is learned."""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a run to continue with this task; JSON-able."""


def generator(seed: int, purpose: int, index: int) -> np.random.Generator:
    key = np.array([seed, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], dtype=np.uint64)))


def batch(task: Task, indices: Sequence[int]) -> Sample:
    """Return some samples of a task, stacked."""
    return stack(task.sample(index) for index in indices)


def stack(samples: Iterable[Sample]) -> Sample:
    """Return samples as one, every array with a first dimension (batch,) more."""
    tokens, keywords = zip(*samples, strict=True)
    return np.stack(tokens), {name: np.stack([each[name] for each in keywords]) for name in keywords[0]}


@dataclass(frozen=True)
class Addition:
    """Sums, as in minGPT's adder: the digits of a, of b, and of a + b from the last to the first.

    85 + 50 = 135 is 8 5 5 0 5 3 1. Only the digits of the sum are learned. A sequence that is longer
    than a sum holds as many as go in. One pair of numbers in ten is held out of training.
    """

    digits: int
    sequence_length: int
    seed: int
    """Decides which sums come when."""
    name: str = "addition"
    vocabulary_size: int = 10

    @property
    def sum_length(self) -> int:
        return 3 * self.digits + 1

    def sample(self, index: int) -> Sample:
        """Return tokens and `labels`, (sequence,) each."""
        random = generator(self.seed, TRAINING, index)
        tokens = np.zeros(self.sequence_length, dtype=np.int64)
        labels = np.full_like(tokens, IGNORED)
        for start in range(0, self.sequence_length - self.sum_length + 1, self.sum_length):
            stop, learned = start + self.sum_length, start + 2 * self.digits
            tokens[start:stop] = self.encode(*self._pair(random, held_out=False))
            labels[learned:stop] = tokens[learned:stop]
        return tokens, {"labels": labels}

    def identity(self) -> dict[str, Any]:
        """Return what decides the samples."""
        return {"task": self.name, "digits": self.digits, "seq": self.sequence_length, "seed": self.seed}

    def encode(self, a: int, b: int) -> Tokens:
        n = self.digits
        return np.array(list(f"{a:0{n}d}{b:0{n}d}" + f"{a + b:0{n + 1}d}"[::-1]), dtype=np.int64)

    def held_out(self, count: int) -> Tokens:
        """Return `count` sums that are never trained on, (count, tokens of a sum)."""
        pairs = (self._pair(generator(self.seed, HELD_OUT, index), held_out=True) for index in range(count))
        return np.stack([self.encode(*pair) for pair in pairs])

    def is_held_out(self, a: int, b: int) -> bool:
        """Whether a pair is kept for the test: by a hash of it, whatever the seed."""
        product = (a * 10**self.digits + b) * 2654435761 & 0xFFFFFFFF  # Knuth's multiplicative hash
        return bool(product < _HELD_OUT_SHARE * 2**32)

    def _pair(self, random: np.random.Generator, held_out: bool) -> tuple[int, int]:
        while True:
            a, b = (int(number) for number in random.integers(10**self.digits, size=2))
            if self.is_held_out(a, b) == held_out:
                return a, b


class Bytes:
    """Windows of a file at random places; a token is a byte."""

    name = "bytes"
    vocabulary_size = 256

    def __init__(self, path: Path, sequence_length: int, seed: int) -> None:
        """Open a text file; raises OsdpError if it cannot be read, is binary or too short."""
        self.sequence_length, self.seed = sequence_length, seed
        self._data = open_text(path)
        if len(self._data) < sequence_length:
            got, expected = f"{len(self._data)} bytes", f"at least {sequence_length}, the sequence length"
            advice = "a longer file, or a smaller --seq"
            raise OsdpError(f"{path} is shorter than one sample", got=got, expected=expected, advice=advice)

    def sample(self, index: int) -> Sample:
        """Return tokens and `labels`, (sequence,) each; all bytes are learned."""
        random = generator(self.seed, TRAINING, index)
        start = int(random.integers(len(self._data) - self.sequence_length + 1))
        tokens = self._data[start : start + self.sequence_length].astype(np.int64)
        return tokens, {"labels": tokens}

    def identity(self) -> dict[str, Any]:
        """Return what decides the samples; of the file, its size."""
        return {"task": self.name, "file_bytes": len(self._data), "seq": self.sequence_length, "seed": self.seed}


def open_text(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file into memory; raises OsdpError for one that is no text."""
    if path.is_dir():
        raise OsdpError(f"{path} is a directory", expected="a text file")
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    except FileNotFoundError:
        raise OsdpError(f"{path} does not exist", expected="a text file", advice="check --data") from None
    except OSError as error:
        raise OsdpError(f"{path} cannot be read", got=error.strerror or str(error), expected="a text file") from None
    if not len(data):
        raise OsdpError(f"{path} is empty", expected="a text file")
    if not data[:_LOOKED_AT_BYTES].all():
        raise OsdpError(f"{path} is a binary file", got="a zero byte", expected="a text file")
    return data
