"""Colour and progress only where a person looks: files and pipes stay clean."""

import io

from dashcupy.terminal import Progress, duration, paint


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_only_on_a_terminal_and_not_against_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert paint("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"


def test_progress_is_silent_in_a_pipe_and_leaves_no_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        with Progress(4, stream) as progress:
            progress.start("first")
            progress.step()
            assert "1/4" in progress.line() and "left" in progress.line()
        if isinstance(stream, Terminal):
            assert "1/4" in stream.getvalue()
            assert stream.getvalue().endswith("\r\033[K")
        else:
            assert stream.getvalue() == ""


def test_duration_reads_well():
    assert [duration(s) for s in (0.42, 12.3, 185, 9000)] == [
        "0.4 s", "12 s", "3 min 5 s", "2 h 30 min"]
