"""What the bench shows: cells, FLOPs, records, tables, pictures, and files made of them."""

import importlib.util
import json
from pathlib import Path

import pytest
from bench_records import of_peer, of_schedule, record

from dashcupy.errors import InvalidInputError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_cells_and_flops():
    # A wrong batch or head count shifts every TFLOP/s figure, and no measurement would show it.
    from bench import cells
    known = (*cells.ALL, *cells.EXTRA)
    assert len(cells.ALL) == 24 and len(known) == len({cell.name for cell in known})
    cell = cells.Cell(128, True, 4096)
    assert (cell.name, cell.batch, cell.n_q_head) == ("d128-causal-4096", 4, 16)
    assert cell.flops("forward") == 4 * 4 * 16 * 4096**2 * 128 / 2
    assert cell.flops("backward") == 2.5 * cell.flops("forward")
    assert [c.name for c in cells.choose(None, quick=True)] == list(cells.QUICK)
    # What is long or expensive runs only when it is named.
    assert len(cells.choose("d64-*-512, d128-full-*")) == 8
    extra, = cells.choose("gqa4-long-d128-full-65536")
    assert (extra.batch, extra.n_q_head, extra.n_kv_head) == (1, 16, 4)
    assert [c.n_q_head for c in cells.choose("d96-full-512,d192-full-512,d256-full-512")] == [
        21, 10, 8]
    with pytest.raises(InvalidInputError, match="d80-full"):
        cells.choose("d80-full-512")
    with pytest.raises(InvalidInputError, match="no cell is called ''"):
        cells.choose("")  # would time nothing


def test_records_merge(tmp_path):
    # A second run that adds a line instead of replacing one, or that drops what it did not measure.
    from bench import records
    path = tmp_path / "new" / "results.json"
    assert records.write(path, [record(ms=9.0), of_peer("cudnn")]) == 2
    assert records.write(path, [record(ms=1.5)]) == 2
    found = records.read(path)
    assert sorted((r["peer"], r["ms"]) for r in found) == [("cudnn", 2.0), ("dashcupy", 1.5)]
    assert records.merge(found, found) == records.merge([], reversed(found)) == found
    assert len(path.read_text().splitlines()) == 4  # a record a line: diffs can be read
    with pytest.raises(KeyError):
        records.write(path, [{"ms": 1.0}])
    assert records.read(path) == found
    path.write_text('{"ms": 1}')
    with pytest.raises(InvalidInputError, match="no list of records"):
        records.write(path, [record()])


def test_a_schedule_by_name_is_taken_before_auto():
    # An old time of "auto" that hides a new one of the schedule that it stands for.
    from bench import records
    found = records.by_schedule([of_schedule("descending", ms=3.0), record(ms=2.0),
                                 record(seqlen=512, kv_len=512, ms=1.0)])
    assert sorted(r["ms"] for r in found.values()) == [1.0, 3.0]


@pytest.mark.parametrize("text", ["", "not JSON", "[1, 2]", "{}", "[{}]", b"\xff"])
def test_files_that_hold_something_else(tmp_path, capsys, text):
    # A traceback instead of the name of the file; README.md given for the results, say.
    from bench import records, show
    path = tmp_path / "card.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInputError, match="card.json"):
        records.read(path)
    with pytest.raises(SystemExit):
        show.main(["--results", str(path), "--write", str(tmp_path / "no" / "README.md")])
    assert "README.md does not exist" in capsys.readouterr().err


def test_tables():
    # A column that shows another peer's time, ours of another cell, or ours without an order.
    from bench import tables
    found = [record(), of_schedule("shortest_first", ms=1.0), of_schedule("unordered", ms=0.5),
             of_peer("fa2_det", ms=3.0), of_peer("cudnn", ms=1.8), of_peer("fa3", ms=1.7),
             of_schedule("shift", causal=False, ms=5.0),
             of_schedule("ascending", causal=False, ms=4.0),
             of_schedule("unordered", causal=False, ms=0.5),
             record(direction="forward", schedule=None, schedule_used=None, ms=0.5, tflops=500.0)]
    full = tables.full(found)
    assert "FA2, deterministic, ms | cuDNN, ms | FA3, ms | fastest other / dashcupy" in full
    assert ("| 128 | causal | 4096 | 16 | 2.000 (344) | `descending` | 3.000 | 1.800 | 1.700 "
            "| 0.85 |") in full
    assert "| 128 | full | 4096 | 16 | 4.000 (344) | `ascending` | - | - | - | - |" in full
    assert "| 128 | causal | 4096 | 16 | 0.500 (500) | - |" in full
    assert "equal bits in every repeat" in full and "NOT equal" not in full
    assert "NOT equal" in tables.full([record(same_bits=False)])
    assert tables.full([]) == tables.compact([]) == ""
    assert "| backward | 128 | causal | - | - | 344 (0.85, 1.50) | - |" in tables.compact(found)
    assert tables.standing(found) == (
        "Backward: as the fastest other kernel 0.85 to 0.85 times as fast, 0.85 in the geometric "
        "mean of 1 cells; as the fastest deterministic one 1.50 to 1.50 times as fast, 1.50 in "
        "the geometric mean of 1 cells.")
    assert tables.standing([]) == "" and tables.families(found) == ["cuDNN", "FA2", "FA3"]


def test_price_of_determinism():
    # A price against the wrong cell, or one that was never measured.
    from bench import tables
    found = [of_schedule("descending", ms=2.2), of_schedule("shortest_first", ms=2.1),
             of_schedule("unordered", ms=2.0, same_bits=False),
             of_schedule("unordered", seqlen=512, kv_len=512), of_schedule("shift", causal=False),
             of_peer("fa2", ms=2.0), of_peer("fa2_det", ms=3.0)]
    text = tables.price(found)
    assert "| 128 | causal | 4096 | 16 | `shortest_first` | 2.100 | 2.000 | 1.050 | no | 1.50 |" \
        in text
    assert "1.050 in the geometric mean of 1 of the 24 cells" in text
    assert len(text.splitlines()) == 5
    assert tables.price([r for r in found if r["schedule"] != "unordered"]) == ""


def _shown(tmp_path, found):
    from bench import records, show
    readme, results = tmp_path / "README.md", tmp_path / "results" / "card.json"
    readme.write_text(f"before\n{show.BEGIN}\nold\n{show.END}\nafter\n")
    records.write(results, found)
    assert show.main(["--results", str(results), "--write", str(readme)]) == 0
    return readme, results


def test_tables_and_pictures_are_written(tmp_path, capsys):
    # Text around the table that is lost, a second table on the second run, a picture that differs
    # each time or that the page does not show.
    pytest.importorskip("matplotlib")
    from bench import show
    found = [record(), of_peer("cudnn"), of_schedule("unordered", ms=1.9)]
    for _ in range(2):
        readme, results = _shown(tmp_path, found)
        pictures = {path.name: path.read_bytes() for path in results.parent.glob("plots/*")}
    text, page = readme.read_text(), (tmp_path / "results" / "card.md").read_text()
    assert text.startswith(f"before\n{show.BEGIN}\n") and text.endswith(f"{show.END}\nafter\n")
    assert "old" not in text and text.count("| backward | 128 | causal |") == 1
    assert page.count("| 128 | causal | 4096 |") == 3  # all cells, price, the paper's experiment
    assert set(pictures) == {"card_backward.svg", "card_price.svg", "card_paper.svg"}
    assert "(results/plots/card_backward.svg)" in text and "(plots/card_price.svg)" in page
    assert "(plots/card_simulated.svg)" not in page
    _shown(tmp_path, found)
    assert pictures == {path.name: path.read_bytes() for path in results.parent.glob("plots/*")}
    assert all(len(picture) < 200_000 for picture in pictures.values())
    with pytest.raises(InvalidInputError, match="speed:begin"):
        show.insert("no markers", "table")
    assert show.main(["--results", str(tmp_path / "none.json")]) == 1
    assert "no records" in capsys.readouterr().err


def test_merge_of_a_run_elsewhere(tmp_path):
    from bench import records, show
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    records.write(here, [record(seqlen=512, kv_len=512)])
    records.write(there, [record()])
    assert show.main(["--results", str(here), "--merge", str(there)]) == 0
    assert [r["seqlen"] for r in records.read(here)] == [512, 4096]
    records.write(here, [record(device="NVIDIA A100")])
    with pytest.raises(InvalidInputError, match="A100, NVIDIA H200"):
        show.files(here, ROOT / "README.md")


def test_summaries():
    # An idle sample that passes for the clock under load; a mean where a median is promised.
    from bench import timing
    found = timing.summarise([1.0, 1.1, 1.2, 9.0, 1.0], host_us=7.0)
    assert (found.ms, found.host_us) == (1.1, 7.0) and 4 < found.ms_spread < 8
    line = timing.describe_clocks("345, 80.1, 30, 0\n1980, 650.5, 60, 99\n1755, 699.0, 65, 100\n"
                                  "[N/A], x\n")
    assert "2 samples" in line and "1755 to 1980" in line and "699 W" in line
    assert timing.describe_clocks("") == "clocks: no sample under load"


def test_files_show_the_records():
    # Figures that were edited by hand, or measured again and not shown.
    from bench import model, plots, records, show, training
    found = records.read()
    if not found:
        pytest.skip(f"no records in {records.RESULTS}")
    hint = "run: python -m bench.schedules --no-measure && python -m bench.show --write"
    made = show.current_model(records.RESULTS, found)
    assert made == model.read(records.RESULTS), hint  # a model of other times is not shown
    for path, text in show.files(records.RESULTS, show.README).items():
        assert path.read_text(encoding="utf-8") == text, hint
    pictures = list((records.RESULTS.parent / show.PICTURES).glob("*.svg"))
    losses, trained = show.picture_of(records.RESULTS, "repro"), training.read(records.RESULTS)
    assert len(pictures) > 1 and losses in pictures, hint
    for picture in pictures:
        digest = (plots.digest([training.of_first_model(trained)], None) if picture == losses
                  else plots.digest(found, made))
        assert digest in picture.read_text(encoding="utf-8"), hint
        assert f"{picture.name})" in show.page_of(records.RESULTS).read_text(encoding="utf-8")


def test_records_are_whole():
    # A record without a field that a reader would look for.
    from bench import records
    for found in records.read():
        assert set(found) == {*records.KEY, *records.VALUES}, json.dumps(found)
        assert found["ms"] > 0 and found["tflops"] > 0
        assert (found["kernel"] is None) == (found["peer"] != "dashcupy")


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


def test_differentiable_calls_are_timed_on_each_thread(monkeypatch):
    """Beside PyTorch's own, with autograd's thread and without it."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from bench import overhead
    threads = []
    monkeypatch.setattr(overhead, "microseconds", lambda call, wait, rounds: (
        threads.append(torch._C._is_multithreading_enabled()) or (1.0, 2.0)))
    records = overhead.on_each_thread(list(torch.randn(4, *overhead.SHAPE)), None, 1)
    assert [(record["call"].removesuffix(overhead.CALLING_THREAD), thread)
            for record, thread in zip(records, threads, strict=True)] == [
        (name, thread) for thread in (True, False)
        for what in (overhead.DIFFERENTIABLE, overhead.SDPA)
        for name in (what + overhead.FORWARD, what + overhead.BOTH)]
    assert sum(record["call"].endswith(overhead.CALLING_THREAD) for record in records) == 4
