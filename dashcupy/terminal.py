"""Colour and a progress line, only where a person looks at a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

_COLOURS = {"green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2"}
_BAR_CELLS = 24


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in a colour, if ``stream`` (default stdout) is a terminal.

    ``NO_COLOR`` set to anything but the empty string switches colours off.
    """
    if os.environ.get("NO_COLOR") or not _is_terminal(stream or sys.stdout):
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def duration(seconds: float) -> str:
    """Seconds for a person: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 30 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Progress:
    """A line on stderr that says how much is done and how long the rest will take.

    On anything but a terminal it writes nothing. Use it as a context manager: the line is gone
    when it ends, also after an error or Ctrl-C.

    Parameters
    ----------
    total
        Number of steps.
    work
        Work in all of them, in any unit; by default each step is one.
    """

    def __init__(self, total: int, stream: TextIO | None = None, *, work: float | None = None):
        self._stream = stream or sys.stderr
        self._shown = _is_terminal(self._stream)
        self._total, self._done = total, 0
        self._work, self._work_done = total if work is None else work, 0.0
        self._start = time.monotonic()
        self._text = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.clear()

    def start(self, text: str) -> None:
        """Show what the current step works on."""
        self._text = text
        self._draw()

    def step(self, work: float = 1.0) -> None:
        """One more step is done, with so much work."""
        self._done += 1
        self._work_done += work
        self._draw()

    def clear(self) -> None:
        """Remove the line, so that something else can be printed in its place."""
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def line(self) -> str:
        """The text of the line, without control characters."""
        share = min(1.0, self._work_done / self._work) if self._work else 1.0
        full = int(_BAR_CELLS * share)
        parts = [f"[{'#' * full}{'.' * (_BAR_CELLS - full)}] {self._done}/{self._total}"]
        if 0 < share < 1:
            passed = time.monotonic() - self._start
            parts.append(f"about {duration(passed * (1 - share) / share)} left")
        return "  ".join([*parts, self._text])

    def _draw(self) -> None:
        if self._shown:
            width = shutil.get_terminal_size().columns
            self._stream.write("\r\033[K" + self.line()[: width - 1])
            self._stream.flush()
