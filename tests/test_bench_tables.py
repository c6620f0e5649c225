"""The bench without a GPU: cells, FLOPs, records, tables, and a README that shows the records."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def _record(**changes):
    return {
        "direction": "backward", "head_dim": 128, "causal": True, "dtype": "bfloat16", "batch": 4,
        "seqlen": 4096, "kv_len": 4096, "q_heads": 16, "kv_heads": 16, "peer": "dashcupy",
        "schedule": "auto", "mode": "deterministic", "device": "NVIDIA H200",
        "schedule_used": "descending", "ms": 2.0, "ms_spread": 0.1, "tflops": 343.6,
        "same_bits": True, "host_us": 40.0, "source_digest": "d", "driver": "580", "cuda": "13.0",
        "versions": {"torch": "2.11.0", "cudnn": "91900"}, "date": "2026-01-01"} | changes


def test_cells_and_flops():
    # A wrong batch or head count shifts every TFLOP/s figure, and no measurement would show it.
    from bench import cells
    assert len(cells.ALL) == len({cell.name for cell in cells.ALL}) == 24
    cell = cells.Cell(128, True, 4096)
    assert (cell.name, cell.batch, cell.n_head) == ("d128-causal-4096", 4, 16)
    assert cell.flops("forward") == 4 * 4 * 16 * 4096**2 * 128 / 2
    assert cell.flops("backward") == 2.5 * cell.flops("forward")
    assert [c.name for c in cells.choose(None, quick=True)] == list(cells.QUICK)
    assert len(cells.choose("d64-*-512, d128-full-*")) == 8
    with pytest.raises(ValueError, match="d96-full"):
        cells.choose("d96-full-512")


def test_records_merge(tmp_path):
    # A second run that adds a line instead of replacing one, or that drops what it did not measure.
    from bench import records
    path = tmp_path / "new" / "results.json"
    other = _record(peer="cudnn", schedule=None, schedule_used=None, mode="default")
    assert records.write(path, [_record(ms=9.0), other]) == 2
    assert records.write(path, [_record(ms=1.5)]) == 2
    found = records.read(path)
    assert sorted((r["peer"], r["ms"]) for r in found) == [("cudnn", 2.0), ("dashcupy", 1.5)]
    assert records.merge(found, found) == records.merge([], reversed(found)) == found
    assert len(path.read_text().splitlines()) == 4  # a record a line: diffs can be read
    with pytest.raises(KeyError):
        records.write(path, [{"ms": 1.0}])
    assert records.read(path) == found
    path.write_text('{"ms": 1}')
    with pytest.raises(ValueError, match="no list of records"):
        records.write(path, [_record()])


def test_table():
    # A column that shows another peer's time, or ours of another cell.
    from bench import show
    peer = dict(schedule=None, schedule_used=None, mode="default")
    found = [_record(), _record(schedule="shortest_first", schedule_used="shortest_first", ms=1.0),
             _record(peer="fa2_det", ms=3.0, **peer), _record(peer="cudnn", ms=1.8, **peer),
             _record(causal=False, ms=5.0, schedule="shift", schedule_used="shift"),
             _record(causal=False, ms=4.0, schedule="ascending", schedule_used="ascending"),
             _record(direction="forward", schedule=None, schedule_used=None, ms=0.5, tflops=500.0)]
    text = show.tables(found)
    assert "| 128 | causal | 4096 | 2.000 (344) | `descending` | 3.000 | - | 1.800 | 1.50 |" in text
    assert "| 128 | full | 4096 | 4.000 (344) | `ascending` | - | - | - | - |" in text
    assert "| 128 | causal | 4096 | 0.500 (500) | - | - | - |" in text
    assert "equal bits in every repeat" in text and "NOT equal" not in text
    assert "NOT equal" in show.tables([_record(same_bits=False)])
    assert show.tables([]) == ""


def test_insert_between_markers(tmp_path, capsys):
    # Text around the table that is lost, or a second table on the second run.
    from bench import records, show
    readme, results = tmp_path / "README.md", tmp_path / "results.json"
    readme.write_text(f"before\n{show.BEGIN}\nold\n{show.END}\nafter\n")
    records.write(results, [_record()])
    for _ in range(2):
        assert show.main(["--results", str(results), "--write", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{show.BEGIN}\n") and text.endswith(f"{show.END}\nafter\n")
    assert "old" not in text and text.count("| 128 | causal | 4096 |") == 1
    with pytest.raises(ValueError, match="speed:begin"):
        show.insert("no markers", "table")
    assert show.main(["--results", str(tmp_path / "none.json")]) == 1
    assert "no records" in capsys.readouterr().err


def test_merge_of_a_run_elsewhere(tmp_path):
    from bench import records, show
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    records.write(here, [_record(seqlen=512, kv_len=512)])
    records.write(there, [_record()])
    assert show.main(["--results", str(here), "--merge", str(there)]) == 0
    assert [r["seqlen"] for r in records.read(here)] == [512, 4096]


def test_summaries():
    # An idle sample that passes for the clock under load; a mean where a median is promised.
    from bench import timing
    found = timing.summarise([1.0, 1.1, 1.2, 9.0, 1.0], host_us=7.0)
    assert (found.ms, found.host_us) == (1.1, 7.0) and 4 < found.ms_spread < 8
    line = timing.describe_clocks("345, 80.1, 30, 0\n1980, 650.5, 60, 99\n1755, 699.0, 65, 100\n"
                                  "[N/A], x\n")
    assert "2 samples" in line and "1755 to 1980" in line and "699 W" in line
    assert timing.describe_clocks("") == "clocks: no sample under load"


def test_readme_shows_the_records():
    # Figures that were edited by hand, or measured again and not shown.
    from bench import records, show
    found = records.read()
    readme = show.README.read_text(encoding="utf-8") if show.README.is_file() else ""
    if not found:
        pytest.skip(f"no records in {records.RESULTS}")
    if show.BEGIN not in readme:
        pytest.skip("README.md has no markers for the tables")
    assert show.insert(readme, show.tables(found)) == readme, \
        "run: python -m bench.show --write"


def test_records_are_whole():
    # A record without a field that a reader would look for.
    from bench import records
    for record in records.read():
        assert set(record) == {*records.KEY, *records.VALUES}, json.dumps(record)
        assert record["ms"] > 0 and record["tflops"] > 0


def test_overhead_is_written_down(tmp_path):
    # Figures that only a terminal has seen cannot be compared with later ones.
    from bench import overhead
    path = tmp_path / "overhead.json"
    overhead.main(["--framework", "none", "--rounds", "1", "--json", str(path)])
    found = json.loads(path.read_text())["calls"]
    assert [(row["framework"], row["call"]) for row in found] == [
        ("any", "plan, forward"), ("any", "plan, backward"),
        *[("torch", overhead.AROUND_NOTHING)] * bool(importlib.util.find_spec("torch"))]
    assert all(0 < row["least_us"] <= row["median_us"] for row in found)
