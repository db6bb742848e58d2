import io

import pytest

from app.cli.progress import ProgressView, duration
from app.storage.events import (
    Event,
    Metric,
    NodeStarted,
    Progress,
    RunStarted,
    TickFinished,
    decode_line,
    encode_event,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *events: Event) -> str:
    view = ProgressView(stream)
    for seq, event in enumerate(events, start=1):
        view.see(decode_line(encode_event(event, seq=seq, run="r", time=0.0)))
    view.end_line()
    return stream.getvalue()


RUN = (
    RunStarted(total_ticks=4),
    NodeStarted(node="1", title="DiT Loader"),
    NodeStarted(node="3", title="SDE Sampler", tick=1),
    Progress(node="3", value=2, total=8, tick=1),
    Metric(name="reward/mean", value=0.25, node="4", tick=1),
    Metric(name="eval/shape_check/mean", value=0.5, node="9", tick=1),
    Metric(name="loss/policy", value=9.0, node="4", tick=1),
    TickFinished(tick=1, total=4, seconds=30.0),
)


def test_a_line_for_each_tick_where_nothing_can_be_updated() -> None:
    text = show(io.StringIO(), *RUN)
    assert text.splitlines() == [
        "DiT Loader ...",
        "tick 1/4  reward/mean 0.2500  30.00 s/tick  ETA 1:30  eval/shape_check/mean 0.5000",
    ]


def test_a_narrow_terminal_still_shows_reward_and_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = show(Terminal(), *RUN)
    assert "reward/mean 0.2500  30.00 s/tick  ETA 1:30" in text
    assert "0.5000" not in text


def test_one_updating_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = show(Terminal(), *RUN)
    assert text.count("\n") == 2
    assert "\r\x1b[2Ktick 1/4  SDE Sampler 2/8" in text
    assert text.endswith("ETA 1:30  eval/shape_check/mean 0.5000\n")


def test_a_long_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "21")
    text = show(Terminal(), *RUN)
    assert max(len(part) for part in text.split("\r\x1b[2K")[1:]) <= 21


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.2, 59, 61, 3661)] == [
        "0:01",
        "0:59",
        "1:01",
        "1:01:01",
    ]
