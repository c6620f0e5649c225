"""Drawings and the command ``schedule``: what is printed, what is drawn, what is refused."""

import argparse
import sys

import pytest

from dashcupy import cli_schedule, draw, schedules
from dashcupy.errors import InvalidInputError, UnsupportedError
from dashcupy.schedules import Shape
from dashcupy.simulate import Costs, simulate

COSTS = Costs(1.0, 0.25, 0.25, 1, "pipelined")
RUN = {"shift": simulate("shift", Shape.from_counts(3, 3), 2, 4, COSTS)}


def command(text):
    parser = argparse.ArgumentParser()
    cli_schedule.add_parser(parser.add_subparsers())
    args = parser.parse_args(["schedule", *text.split()])
    return args.run(args)


def test_step_table_of_a_pair():
    """The short kv tile of a pair stands behind a bar; a column per step."""
    table = draw.step_table(schedules.get("symmetric_shift"), Shape.from_counts(4, 4, True))
    assert table.splitlines() == [
        "symmetric_shift: causal mask, 4 q tiles, 4 kv tiles; cells are q tile.ticket",
        "work   kv     0    1    2    3    4",
        "   0  0,3   1.0  2.1  3.1  0.0 |3.3",
        "   1  1,2   2.0  3.0  1.1 |3.2  2.2"]


def test_step_table_is_cut_and_says_so():
    table = draw.step_table(schedules.get("shift"), Shape.from_counts(100, 50))
    lines = table.splitlines()
    assert lines[-1] == "... (32 of 50 works, 32 of 100 steps)" and len(lines) == 2 + 32 + 1
    assert max(map(len, lines)) < 250


def test_gantt_writes_what_the_suffix_says(tmp_path):
    """SVG twice the same: a date or a random id would make every redrawn picture a change."""
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg", "run.png"):
        draw.gantt(RUN, COSTS, tmp_path / name, title="two heads")
    one, two, png = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg", "run.png"))
    assert one == two and one.startswith(b"<?xml") and png.startswith(b"\x89PNG")


def test_gantt_draws_a_hang_and_many_workers(tmp_path):
    pytest.importorskip("matplotlib")
    hang = simulate("shift", Shape.from_counts(4, 4), 1, 3, COSTS)
    assert hang.deadlock
    draw.gantt({"shift": hang}, COSTS, tmp_path / "hang.png")
    shape = Shape.from_counts(4, 50)
    draw.gantt({"shift": simulate("shift", shape, 1, 50)}, Costs(), tmp_path / "many.png")
    nothing = simulate("shift", Shape.from_counts(0, 4), 1, 4)
    draw.gantt({"shift": nothing}, Costs(), tmp_path / "nothing.png")


def test_gantt_refusals(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match=r"must be one of \.svg, \.png"):
        draw.gantt(RUN, COSTS, tmp_path / "run.jpg")
    with pytest.raises(InvalidInputError, match="at least one simulation"):
        draw.gantt({}, COSTS, tmp_path / "run.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'dashcupy\[plot\]'"):
        draw.gantt(RUN, COSTS, tmp_path / "run.svg")


def test_command_for_one_schedule(capsys):
    assert command("descending --kv 4 --heads 2 --mask causal --sms 4 --head-group 1") == 0
    assert capsys.readouterr().out == """\
descending: causal mask, 4 q tiles, 4 kv tiles; cells are q tile.ticket
work  kv     0    1    2    3
   0   0   3.0  2.0  1.0  0.0
   1   1   3.1  2.1  1.1
   2   2   3.2  2.2
   3   3   3.3

2 heads, 1 at a time, on 4 SMs
schedule          makespan     bound bound/makespan   stall    idle
descending            7.00      6.25          0.893    5.4%    5.4%

  SM      busy     stall      idle
   0      6.25      0.00      0.75
   1      6.25      0.25      0.50
   2      6.25      0.50      0.25
   3      6.25      0.75      0.00
"""


def test_command_hands_out_all_heads_together(capsys):
    """As the kernels do for so few heads; the long kv tiles of both then start first."""
    assert command("descending --kv 4 --heads 2 --mask causal --sms 4") == 0
    assert """
2 heads on 4 SMs
schedule          makespan     bound bound/makespan   stall    idle
descending            6.50      6.25          0.962    1.9%    1.9%
""" in capsys.readouterr().out


def test_command_compares_all_of_a_mask(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.svg"
    assert command(f"all --kv 4 --mask causal_top_left --q 3 --sms 2 --plot {path}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 head on 2 SMs"
    assert [line.split()[0] for line in lines[2:7]] == [
        "ascending", "descending", "longest_first", "shortest_first", "symmetric_shift"]
    assert path.exists()


def test_file_that_cannot_be_written(tmp_path):
    """A traceback in place of one line that says what to do."""
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidInputError, match=r"cannot draw to .*x\.svg \(No such file"):
        command(f"shift --kv 2 --plot {tmp_path / 'missing' / 'x.svg'}")


def test_command_reports_a_hang(capsys):
    """Fewer CTAs than the team: exit status 1, and who waits for whom."""
    assert command("shift --kv 4 --sms 3") == 1
    assert "shift            hangs: CTA 2 (head 0, kv tile 2) waits" in capsys.readouterr().out


def test_command_refusals():
    with pytest.raises(InvalidInputError, match="for full use .*'shift'"):
        command("symmetric_shift")
    for option in ("--kv", "--q", "--stride", "--heads", "--q-per-kv", "--sms"):
        with pytest.raises(InvalidInputError, match=f"^{option} 0: must be at least 1"):
            command(f"shift {option} 0")
    for option in ("--compute", "--reduce", "--latency", "--slots"):
        with pytest.raises(InvalidInputError, match=f"^{option}=-1.*: must be a finite number"):
            command(f"shift {option} -1")
    with pytest.raises(InvalidInputError, match="^--head-group 3: must be 1 to 2, the heads"):
        command("shift --heads 2 --head-group 3")
    with pytest.raises(InvalidInputError, match="mean 'shift'"):
        command("shfit")
    for large in ("auto --kv 3000", "all --kv 1000 --heads 4 --q-per-kv 2", "auto --sms 5000000"):
        with pytest.raises(InvalidInputError, match="at most 4000000"):
            command(large)


@pytest.mark.parametrize("text, line", [
    # Half of as many SMs as kv tiles would be idle, and look like a fault of the schedule.
    ("symmetric_shift --mask causal", "1 head on 4 SMs (as --sms is not given: one for each work"),
    ("descending --mask causal", "1 head on 8 SMs (as --sms is not given: one for each work"),
    ("all --mask causal", "1 head on 8 SMs (as --sms is not given: one for each kv tile"),
    ("symmetric_shift --mask causal --sms 8", "1 head on 8 SMs\n")])
def test_the_number_of_sms_that_is_assumed_is_told(capsys, text, line):
    assert command(text) == 0
    assert line in capsys.readouterr().out
