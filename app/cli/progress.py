"""What a person at the terminal sees of a run: one updating line, or one line per tick where that cannot be."""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from app.cli.output import drop
from app.storage.events import EventLine

_RECENT = 10
"""Ticks whose mean duration the remaining time is reckoned with."""


def told(name: str) -> bool:
    """Whether a metric is worth a place on the terminal: the reward, evaluations, and the losses of supervised training."""
    evaluation = name.startswith("eval/") and name.endswith("/mean")
    return (
        name == "reward/mean" or evaluation or (name.startswith("loss/") and name != "loss/policy")
    )


class ProgressView:
    """Follows the events of a run and tells of them on a stream (stderr); a run does not need anyone who reads it."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._updating = stream.isatty()
        self._open_line = False
        self._total = 0
        self._tick = 0
        self._titles: dict[str, str] = {}
        self._metrics: dict[str, float] = {}
        self._fresh: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def see(self, line: EventLine) -> None:
        """Take an event in."""
        data = line.data
        if line.type == "run_started":
            self._total = int(data["total_ticks"])
        elif line.type == "node_started":
            self._titles[str(data["node"])] = str(data["title"])
            if line.tick is None:
                self.say(f"{data['title']} ...")
        elif line.type == "progress":
            title = self._titles.get(str(data["node"]), str(data["node"]))
            text = f"{title} {data['value']}/{data['total']}"
            if self._updating:
                self._update(f"{self._head(line.tick)}  {text}")
        elif line.type == "metric" and line.tick is not None:
            name, value = str(data["name"]), float(data["value"])
            if told(name):
                self._metrics[name] = self._fresh[name] = value
        elif line.type == "tick_finished":
            self._finish_tick(line)
        elif line.type == "notice":
            self.say(str(data["message"]))
        elif line.type == "checkpoint_saved" and self._updating:
            self._update(f"{self._head(line.tick)}  checkpoint saved")
        elif line.type == "state_changed":
            words = {"saving": "saving ...", "paused": "paused", "running": "going on"}
            self.say(words.get(str(data["state"]), str(data["state"])))
        elif line.type == "command_done":
            self.say(f"{data['command']}: {data['message']}")
        elif line.type == "resumed":
            self.say(f"going on after tick {data['tick']}")

    def say(self, text: str) -> None:
        """A line of its own, which stays."""
        self.end_line()
        self._write(f"{text}\n")

    def end_line(self) -> None:
        """Leave the updating line, if there is one, as it is."""
        if self._open_line:
            self._write("\n")
            self._open_line = False

    def _finish_tick(self, line: EventLine) -> None:
        tick = line.tick or 0
        self._tick, self._total = tick, int(line.data["total"])
        seconds = float(line.data["seconds"])
        if tick > 0:
            self._seconds.append(seconds)
        shown = self._metrics if self._updating else self._fresh
        # A narrow terminal cuts the end off: what is of this tick comes first, the last evaluation last.
        words = {name: f"{name} {value:.4f}" for name, value in shown.items()}
        parts = [
            self._head(tick),
            *(text for name, text in words.items() if not name.startswith("eval/")),
        ]
        parts.append(f"{seconds:.2f} s/tick")
        if self._seconds and tick < self._total:
            mean = sum(self._seconds) / len(self._seconds)
            parts.append(f"ETA {duration(mean * (self._total - tick))}")
        parts += [text for name, text in words.items() if name.startswith("eval/")]
        text = "  ".join(parts)
        if self._updating:
            self._update(text)
        else:
            self.say(text)
        self._fresh = {}

    def _head(self, tick: int | None) -> str:
        return f"tick {tick}/{self._total}" if tick is not None else "loading"

    def _update(self, text: str) -> None:
        # A line that wraps could not be replaced: the cursor only goes back to the start of its last row.
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[2K{text[:width]}")
        self._open_line = True

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            drop(self._stream)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss under an hour."""
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
