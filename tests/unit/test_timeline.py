"""Timelines: who waits for whom, by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from osdp.plots import COLOURS, check_picture, plot_timelines
from osdp.uneven_lengths import step_clock
from osdp.uneven_lengths.step_clock import Note, begin
from osdp.uneven_lengths.timeline import Call, CallTimeline, Recorder, Span, timelines
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


class Ticks:
    """A clock that is read at these moments."""

    def __init__(self, *moments: float) -> None:
        self.moments = iter(moments)

    def mark(self) -> float:
        return next(self.moments)

    def at_s(self, mark: float) -> float:
        return mark

    def is_own_stream(self) -> bool:
        return True

    def noting_waits(self, note: Note) -> AbstractContextManager[object]:
        return nullcontext()


def test_calls_inside_others_count_by_themselves() -> None:
    recorder, found = Recorder(Ticks(0.0, 1.0, 2.0, 5.0, 7.0, 8.0, 9.0, 12.0)), CallTimeline()
    inner = recorder.watched("barrier", BOTH, lambda: "met")

    def pulls() -> str:
        return inner() + inner()

    assert recorder.watched("pull", (), pulls)() == "metmet"
    recorder.end(found)
    assert (found.start_s, found.end_s) == (0.0, 12.0)
    assert found.calls == [
        Call("pull", 1.0, 2.0),
        meet(2.0, 5.0),
        Call("pull", 5.0, 7.0),
        meet(7.0, 8.0),
        Call("pull", 8.0, 9.0),
    ]


# --- streams of a GPU


class Streams:
    """A simulated GPU with a stream of its own for communication; to enqueue takes the host no time."""

    def __init__(self, begun_s: float) -> None:
        self.free_s = {"own": begun_s, "communication": begun_s}
        """When each will have done what it has."""
        self.current = "own"
        self.is_read = False
        self._note: Note | None = None

    def run(self, seconds: float, until_s: float = 0.0) -> None:
        """Enqueue something that takes so long, or until then."""
        self.free_s[self.current] = max(self.free_s[self.current] + seconds, until_s)

    def wait(self, stream: str, other: str) -> None:
        before = self.free_s[stream]
        self.free_s[stream] = max(before, self.free_s[other])
        if stream == "own" and self._note is not None:
            self._note(before, self.free_s[stream])

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def mark(self) -> float:
        assert not self.is_read, "moments are read at the end of the step"
        return self.free_s[self.current]

    def at_s(self, mark: float) -> float:
        self.is_read = True
        return mark

    def is_own_stream(self) -> bool:
        return self.current == "own"

    @contextmanager
    def noting_waits(self, note: Note) -> Iterator[None]:
        self._note = note
        yield
        self._note = None


def gathers_beside(products_s: tuple[float, float], gathered_at_s: tuple[float, float]) -> CallTimeline:
    """Gather a unit; gather the next beside its products, wait for that, and compute again for 2 s."""
    gpu, found = Streams(100.0), CallTimeline()
    recorder = Recorder(gpu)

    def gather(at_s: float) -> None:
        with gpu.on("communication"):
            recorder.watched("gather", BOTH, lambda: gpu.run(1.0, at_s))()

    with recorder.noting_waits():
        gpu.run(products_s[0])
        gpu.wait("communication", "own")
        gather(gathered_at_s[0])
        gpu.wait("own", "communication")
        gpu.run(products_s[1])
        gather(gathered_at_s[1])
        gpu.wait("own", "communication")
        gpu.run(2.0)
        recorder.end(found)
    return found


def test_what_runs_beside_products_is_no_bubble() -> None:
    """Rank 0 comes to the gathers at 101 and 104 s, rank 1 at 103 and 104 s; they end at 104 and 108 s."""
    first, second = timelines([gathers_beside((1.0, 3.0), (104.0, 108.0)), gathers_beside((3.0, 6.0), (104.0, 108.0))])
    assert first.spans == (
        Span("compute", 0.0, 1.0),
        Span("waiting", 1.0, 3.0),
        Span("communication", 3.0, 4.0),
        Span("compute", 4.0, 7.0),
        Span("communication", 7.0, 8.0),
        Span("compute", 8.0, 10.0),
        Span("waiting", 10.0, 12.0),
    )
    # Of the second gather rank 1 sees nothing: it ends under its products.
    assert second.spans == (Span("compute", 0.0, 3.0), Span("communication", 3.0, 4.0), Span("compute", 4.0, 12.0))
    assert (first.bubble_s, second.bubble_s) == (4.0, 0.0)


def test_only_the_part_of_a_wait_in_which_another_rank_is_late_is_a_bubble() -> None:
    """Rank 0's second gather begins at 104 s, and rank 1's after a first one that takes until 109 s."""
    late = CallTimeline(100.0, 115.0, [Call("gather", 109.0, 111.0, BOTH, stalls=False)])
    early = CallTimeline(100.0, 115.0, [Call("gather", 104.0, 111.0, BOTH, stalls=False)], [(102.0, 112.0)])
    first, second = timelines([early, late])
    assert [(span.activity, span.end_s) for span in first.spans] == [
        ("compute", 2.0),
        ("communication", 4.0),
        ("waiting", 9.0),
        ("communication", 12.0),
        ("compute", 15.0),
    ]
    assert second.spans == (Span("compute", 0.0, 15.0),)


def test_waits_of_a_stream_are_noted_as_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `wait_event` and `wait_stream`; of other streams they are not."""
    made: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            made.append(f"{self.name} waits for {event}")

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.name)

    class Queue:
        def __init__(self, device: torch.device) -> None:
            self.marks = 0

        def mark(self) -> int:
            self.marks += 1
            return self.marks

    own, other = Stream("own"), Stream("other")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(step_clock, "CudaQueue", Queue)
    clock, noted = begin(torch.device("cuda")), list[tuple[int, int]]()
    assert clock.is_own_stream()
    with clock.noting_waits(lambda before, after: noted.append((before, after))):
        own.wait_event("an event")
        other.wait_stream(own)
        own.wait_stream(other)
    own.wait_event("another")
    assert made == ["own waits for an event", "other waits for own", "own waits for other", "own waits for another"]
    assert noted == [(2, 3), (4, 5)]


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
