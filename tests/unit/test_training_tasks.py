"""Samples of the tasks, against ones worked out by hand, and that they depend on seed and number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from osdp.training.tasks import IGNORED, Addition, Bytes, batch
from profiler.errors import OsdpError


def test_a_sum_is_written_as_in_mingpt() -> None:
    """minGPT's example: 85 + 50 = 135 is 8 5 5 0 5 3 1."""
    assert Addition(2, 7, 0).encode(85, 50).tolist() == [8, 5, 5, 0, 5, 3, 1]
    assert Addition(3, 10, 0).encode(7, 95).tolist() == [0, 0, 7, 0, 9, 5, 2, 0, 1, 0]


def test_only_the_digits_of_the_sum_are_learned() -> None:
    tokens, keywords = Addition(2, 7, 0).sample(5)
    (labels,) = keywords.values()
    assert labels[:4].tolist() == [IGNORED] * 4
    assert labels[4:].tolist() == tokens[4:].tolist()
    a, b = 10 * tokens[0] + tokens[1], 10 * tokens[2] + tokens[3]
    assert tokens[4] + 10 * tokens[5] + 100 * tokens[6] == a + b


def test_a_long_sequence_holds_as_many_sums_as_go_in() -> None:
    """Three sums of 7 tokens in 23, and two tokens left over."""
    tokens, keywords = Addition(2, 23, 0).sample(0)
    labels = keywords["labels"]
    assert (labels != IGNORED).sum() == 3 * 3
    assert tokens[21:].tolist() == [0, 0]
    assert labels[21:].tolist() == [IGNORED] * 2
    for start in (0, 7, 14):
        a0, a1, b0, b1, *answer = tokens[start : start + 7]
        assert sum(digit * 10**place for place, digit in enumerate(answer)) == 10 * (a0 + b0) + a1 + b1


def test_training_and_test_share_no_sum() -> None:
    task = Addition(1, 4, 3)
    trained = {tuple(task.sample(index)[0][:2]) for index in range(3000)}
    asked = {tuple(tokens[:2]) for tokens in task.held_out(300)}
    assert trained & asked == set()
    assert len(trained | asked) == 100  # all pairs of one digit come up
    held_out = sum(Addition(2, 7, 0).is_held_out(a, b) for a in range(100) for b in range(100))
    assert held_out == pytest.approx(1000, abs=50)


def test_samples_depend_on_seed_and_number_alone() -> None:
    one, same, other = Addition(2, 7, 1), Addition(2, 7, 1), Addition(2, 7, 2)
    forward = [one.sample(index)[0].tolist() for index in range(50)]
    backward = [same.sample(index)[0].tolist() for index in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [other.sample(index)[0].tolist() for index in range(50)]
    assert len({tuple(sample) for sample in forward}) > 45


def test_bytes_are_windows_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 201)))
    task = Bytes(path, 16, 0)
    starts = set()
    for index in range(2000):
        tokens, keywords = task.sample(index)
        start = int(tokens[0])
        assert tokens.tolist() == list(range(start, start + 16))
        assert keywords["labels"].tolist() == tokens.tolist()
        starts.add(start)
    assert starts == set(range(1, 186))  # the last window too
    assert task.sample(7)[0].tolist() == Bytes(path, 16, 0).sample(7)[0].tolist()


def test_a_file_as_long_as_a_sample_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("12345")
    assert Bytes(path, 5, 0).sample(9)[0].tolist() == [49, 50, 51, 52, 53]
    with pytest.raises(OsdpError, match="shorter than one sample"):
        Bytes(path, 6, 0)


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "is empty"), (b"ab\0cd", "is a binary file"), (None, "does not exist")]
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OsdpError, match=told):
        Bytes(path, 2, 0)
    with pytest.raises(OsdpError, match="is a directory"):
        Bytes(tmp_path, 2, 0)


def test_a_batch_stacks_samples_in_order() -> None:
    task = Addition(2, 7, 0)
    tokens, keywords = batch(task, range(4, 7))
    assert tokens.shape == keywords["labels"].shape == (3, 7)
    assert np.array_equal(tokens[2], task.sample(6)[0])
