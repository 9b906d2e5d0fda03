"""What a sample costs by its length: parabolas by hand, and a model's products by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from osdp.resources import resource_file
from osdp.uneven_lengths.length_cost import parabola, predicted_cost
from profiler.errors import OsdpError


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ([7 + 3 * n + 2 * n**2 for n in (2, 4, 8)], (3.0, 2.0)),
        ([5 + 3 * n for n in (2, 4, 8)], (3.0, 0.0)),
        # A slope that falls from 5 to 1: the line from the first to the last, 14 over 6.
        ([0, 10, 14], (7 / 3, 0.0)),
        # Nothing grows before the last, which has 60 more tokens squared than the first.
        ([6, 6, 66], (0.0, 1.0)),
        ([4, 4, 4], (0.0, 0.0)),
        ([4, 3, 2], (0.0, 0.0)),
    ],
)
def test_parabolas_by_hand(seconds: list[float], wanted: tuple[float, float]) -> None:
    assert parabola((2, 4, 8), seconds) == pytest.approx(wanted)


def test_the_products_of_a_gpt2(tmp_path: Path) -> None:
    """On a device whose memory takes no time, what is left is FLOPs over the rate."""
    text = resource_file("clusters", "titan-rtx-8", "").read_text()
    text, count = re.subn(r"(memory_bytes_per_s:\s+value: )[\d.e+]+", r"\g<1>1.0e+20", text, count=1)
    assert count == 1
    cluster = tmp_path / "no-memory.yaml"
    cluster.write_text(text)
    cost = predicted_cost("gpt2-tiny", str(cluster), 128)
    layers, hidden, vocabulary, rate = 4, 64, 512, 16.3e12 * 0.8
    # A token: 12 h^2 weights a layer and the head's, two FLOPs each in forward and four in backward.
    assert cost.per_token == pytest.approx(6 * (layers * 12 * hidden**2 + vocabulary * hidden) / rate, rel=1e-6)
    # A pair of tokens: two products of h in forward; five in backward, as the scores are computed again.
    assert cost.per_square == pytest.approx(layers * (2 + 5) * 2 * hidden / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "longest", "said"),
    [("gpt2-tiny", 3, "too short"), ("gpt2-tiny", 4096, "cannot take"), ("no-such-model", 64, "no-such-model")],
)
def test_what_cannot_be_is_refused(model: str, longest: int, said: str) -> None:
    with pytest.raises(OsdpError, match=said):
        predicted_cost(model, "titan-rtx-8", longest)
