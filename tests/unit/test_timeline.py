"""Timelines: who waits for whom, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from osdp.plots import COLOURS, check_picture, plot_timelines
from osdp.uneven_lengths import timeline
from osdp.uneven_lengths.timeline import Call, CallTimeline, Span, timelines
from profiler.errors import OsdpError

BOTH = (0, 1)


def meet(start_s: float, end_s: float, ranks: tuple[int, ...] = BOTH) -> Call:
    """Return a barrier."""
    return Call("barrier", start_s, end_s, ranks)


def test_the_first_waits_for_the_last() -> None:
    first, second = timelines(
        [CallTimeline(100.0, 106.0, [meet(101.0, 104.0)]), CallTimeline(100.5, 110.0, [meet(103.0, 104.5)])]
    )
    # Rank 0 comes at 101 and rank 1 at 103; at the end rank 0 waits from 106 to 110.
    assert first.spans == (
        Span("compute", 0.0, 1.0),
        Span("waiting", 1.0, 3.0),
        Span("communication", 3.0, 4.0),
        Span("compute", 4.0, 6.0),
        Span("waiting", 6.0, 10.0),
    )
    assert second.spans == (Span("compute", 0.5, 3.0), Span("communication", 3.0, 4.5), Span("compute", 4.5, 10.0))
    assert (first.bubble_s, second.bubble_s) == (6.0, 0.0)
    assert first.total_s("compute") == 3.0


def test_calls_are_matched_in_their_groups() -> None:
    """Ranks 0 and 1 meet twice, ranks 1 and 2 once, and rank 2 pulls without anyone."""
    found = timelines(
        [
            CallTimeline(0.0, 20.0, [meet(2.0, 5.0), meet(6.0, 14.0)]),
            CallTimeline(0.0, 20.0, [meet(4.0, 5.0), meet(8.0, 11.0, (1, 2)), meet(13.0, 14.0)]),
            CallTimeline(0.0, 20.0, [Call("pull", 1.0, 4.0), meet(10.0, 11.0, (1, 2))]),
        ]
    )
    assert [one.bubble_s for one in found] == [2.0 + 7.0, 2.0, 0.0]
    assert [one.total_s("communication") for one in found] == [1.0 + 1.0, 1.0 + 1.0 + 1.0, 3.0 + 1.0]
    assert all(one.spans[0].start_s == 0.0 and one.spans[-1].end_s == 20.0 for one in found)
    assert all(a.end_s == b.start_s for one in found for a, b in zip(one.spans, one.spans[1:], strict=False))


def test_who_need_not_wait_for_the_last_does_not() -> None:
    """A sender may be done before its receiver comes."""
    first, _ = timelines([CallTimeline(0.0, 9.0, [meet(1.0, 2.0)]), CallTimeline(0.0, 9.0, [meet(5.0, 6.0)])])
    assert first.bubble_s == 1.0


def test_ranks_must_have_met_equally_often() -> None:
    with pytest.raises(OsdpError, match="synchronize equally often"):
        timelines([CallTimeline(0.0, 9.0, [meet(1.0, 2.0), meet(3.0, 4.0)]), CallTimeline(0.0, 9.0, [meet(1.0, 2.0)])])


def test_calls_inside_others_count_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    monkeypatch.setattr(timeline.time, "monotonic", lambda: next(clock))
    recorder = CallTimeline()
    inner = recorder.watched("barrier", BOTH, lambda: "met")

    def pulls() -> str:
        return inner() + inner()

    assert recorder.watched("pull", (), pulls)() == "metmet"
    assert recorder.calls == [
        Call("pull", 1.0, 2.0),
        meet(2.0, 5.0),
        Call("pull", 5.0, 7.0),
        meet(7.0, 8.0),
        Call("pull", 8.0, 9.0),
    ]


# --- the picture


def test_the_picture_has_every_rank_of_both(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = timelines([CallTimeline(0.0, 6.0, [meet(1.0, 4.0)]), CallTimeline(0.0, 9.0, [meet(3.0, 4.0)])])
    path = tmp_path / "steps.svg"
    check_picture(path, "--timeline")
    plot_timelines(path, {"FSDP": found, "ODC": found[:1]}, "a step")
    drawn = path.read_text()
    assert drawn.index("FSDP: waiting 5.000, 0.000 s") < drawn.index("ODC: waiting 5.000 s")
    assert drawn.count("<!-- rank 0 -->") == 2
    assert drawn.count("<!-- rank 1 -->") == 1
    # Of rank 0 twice, of rank 1, and in the legend.
    shares = {kind: drawn.count(f"fill: {colour}") for kind, colour in COLOURS.items()}
    assert shares == {"compute": 2 + 2 + 2 + 1, "communication": 1 + 1 + 1 + 1, "waiting": 2 + 2 + 0 + 1}


@pytest.mark.parametrize(("name", "said"), [("a.txt", "cannot be drawn"), ("none/a.png", "no such directory")])
def test_bad_pictures_are_refused(tmp_path: Path, name: str, said: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OsdpError, match=said):
        check_picture(tmp_path / name, "--timeline")


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OsdpError, match=r".venv/bin/pip install -e '\.\[plot\]'"):
        check_picture(tmp_path / "a.png", "--timeline")
