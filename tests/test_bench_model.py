"""Times of the simulator beside measured ones, and what the bench says of the DASH paper."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from bench_records import of_schedule, record

from dashcupy.errors import InvalidInputError
from dashcupy.schedules import Shape
from dashcupy.simulate import Costs, simulate

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"name": "bwd_sm90", "q_tile": 64, "kv_tile": 128, "head_group": 2, "resident": 10}
SCHEDULES = ("ascending", "descending", "shortest_first", "symmetric_shift")


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def _records(costs, fixed_ms, step_us, kernel=KERNEL):
    """Times of a machine that is the simulator."""
    found = []
    for seqlen in (512, 1024, 2048):
        shape = Shape(seqlen, seqlen, kernel["q_tile"], kernel["kv_tile"], True, 0)
        for schedule in SCHEDULES:
            span = simulate(schedule, shape, 6, kernel["resident"], costs, q_per_kv=2,
                            head_group=kernel["head_group"]).makespan
            found.append(of_schedule(schedule, batch=3, seqlen=seqlen, kv_len=seqlen, q_heads=4,
                                     kv_heads=2, kernel=kernel,
                                     ms=round(fixed_ms + 1e-3 * step_us * span, 4)))
    return found


@pytest.mark.parametrize("kernel, costs", [
    ("bwd_sm90", Costs(1.0, 0.6, 2.0, 2, "pipelined")), ("bwd_sm80", Costs(1.0, 2.0, 0.0, 0))])
def test_fit_finds_the_machine_again(kernel, costs):
    # CTAs, groups of heads, GQA or slots that the model takes otherwise than the kernels do.
    from bench import model
    found = _records(costs, 0.2, 3.0, KERNEL | {"name": kernel})
    fitted = model.fit(found)
    assert fitted.fixed_ms == pytest.approx(0.2, rel=0.02)
    assert fitted.compute_us == pytest.approx(3.0, rel=0.01)
    assert fitted.reduce_us == pytest.approx(3.0 * costs.reduce, rel=0.01)
    assert fitted.latency_us == pytest.approx(3.0 * costs.latency, rel=0.01)
    assert fitted.error < 1e-3 and fitted.least_hop_us < 3.0 * costs.hop + 1e-6
    assert fitted.most_hop_us > 3.0 * costs.hop - 1e-6
    made = model.predict(found)
    assert all(p["predicted_ms"] == pytest.approx(p["ms"], rel=1e-3)
               for p in made["predictions"])
    assert len(made["predictions"]) == len(found)


def test_a_cell_that_something_else_limits_does_not_bend_the_fit():
    from bench import model, tables
    found = _records(Costs(1.0, 0.2, 0.5, 2, "pipelined"), 0.2, 3.0)
    found[0] = found[0] | {"ms": 2 * found[0]["ms"]}
    made = model.predict(found)
    wrong = [p for p in made["predictions"] if tables.is_wrong(p)]
    assert [p["ms"] for p in wrong] == [found[0]["ms"]]
    assert tables.predictions(made).count("!") == 1


def test_unordered_is_simulated_without_turns():
    from bench import model
    costs = Costs(1.0, 0.6, 4.0, 2, "pipelined")
    r = _records(costs, 0.2, 3.0)[0] | {"schedule_used": "unordered"}
    shape = Shape(512, 512, 64, 128, True, 0)

    def span(costs):
        return simulate("unordered", shape, 6, 10, costs, q_per_kv=2, head_group=2).makespan
    free = dataclasses.replace(costs, ordered=False)
    assert model.makespan(r, costs) == span(free)
    assert model.predict([*_records(costs, 0.2, 3.0), of_schedule(
        "unordered", **{k: r[k] for k in ("batch", "seqlen", "kv_len", "q_heads", "kv_heads",
                                          "kernel")})])["fits"][0]["n"] == 12


def test_what_cannot_be_simulated_is_left_out():
    from bench import model
    found = [of_schedule("ascending"),  # of a run that did not say what it ran
             of_schedule("gone", kernel=KERNEL),
             of_schedule("descending", seqlen=2**20, kv_len=2**20, kernel=KERNEL),
             record(direction="forward", schedule=None, schedule_used=None)]
    assert model.usable(found) == []
    assert model.predict(found) == {"fits": [], "predictions": []}


def test_records_of_a_kernel_that_is_gone_are_simulated():
    """They stay in a results file until their cells are measured again."""
    from bench import model
    found = _records(Costs(1.0, 0.2, 0.0, 2, "pipelined"), 0.2, 3.0, KERNEL | {"name": "bwd_gone"})
    made, = model.predict(found)["fits"]
    assert made["kernel"] == "bwd_gone" and made["error"] < 1e-3


def test_a_model_belongs_to_its_times(tmp_path):
    # A model of older times that stays beside newer ones unnoticed.
    from bench import model, show
    found = _records(Costs(1.0, 0.2, 0.0, 2, "pipelined"), 0.2, 3.0)[:4]
    results = tmp_path / "card.json"
    assert model.read(results) is None
    model.write(results, model.predict(found))
    assert model.is_of(model.read(results), found)
    assert show.current_model(results, [*found[1:], found[0] | {"ms": 9.0}]) is None
    assert not model.is_of(model.read(results), found[:3])


def test_stored_predictions_are_those_of_the_simulator():
    """One cell of the results again: the model file was made by this simulator."""
    from bench import model, records
    found, made = records.read(), model.read(records.RESULTS)
    if not made:
        pytest.skip("no model of the results")
    known = model.by_schedule(made)
    shortest = min(model.usable(found), key=lambda r: (r["seqlen"], not r["causal"]))
    key = records.cell_of(shortest), shortest["schedule_used"]
    line, = (line for line in made["fits"] if (line["kernel"], line["head_dim"]) == (
        shortest["kernel"]["name"], shortest["head_dim"]))
    fitted = model.Fit(**line)
    assert fitted.ms(model.makespan(shortest, fitted.ratios)) == pytest.approx(
        known[key]["predicted_ms"], rel=1e-3)


@pytest.mark.parametrize("causal, assignment, shift", [
    (True, "round_robin", "symmetric_shift"), (False, "counter", "shift")])
def test_dag_model_is_the_simulator_with_the_papers_rules(causal, assignment, shift):
    from bench import cells, paper
    n, m = 16, 4

    def span(schedule, assignment="counter", group=1):
        return simulate(schedule, Shape.from_counts(n, n, causal), m, n,
                        Costs(reduce=paper.DAG_REDUCE), assignment=assignment,
                        head_group=group).makespan
    base = span("ascending", assignment)
    assert paper.dag_speed(cells.Cell(128, causal, 128 * n), m) == pytest.approx(
        {"ascending": 1.0, "descending": base / span("descending"),
         shift: base / span(shift, group=None)})


def test_paper_figures_are_those_of_the_paper():
    """Its headline is 1.28 in one cell; a shifted row or column would move it."""
    from bench import cells, paper
    best = {cell.name: max(row.theirs.values()) / row.theirs["ascending"]
            for row in paper.rows([], None) if (cell := row.cell)}
    assert max(best, key=best.get) == "d128-causal-16384"
    assert best["d128-causal-16384"] == pytest.approx(1.284, abs=5e-4)
    assert len(best) == len(cells.ALL) and min(best.values()) >= 1.0


def _paper_records(**ms):
    cell = dict(batch=1, seqlen=16384, kv_len=16384, causal=True)
    return [of_schedule(name, ms=value, **cell) for name, value in ms.items()]


def test_verdicts_are_worked_out_from_records():
    # A sentence that stays when the measurement has turned.
    from bench import paper
    claim, = (c for c in paper.CLAIMS if c.text.startswith("causal mask: descending"))

    def said(**ms):
        text = paper.claims_text(paper.rows(_paper_records(**ms), None))
        line, = (line for line in text.splitlines() if claim.text in line)
        return line.split(" | ")[1:]
    theirs, model, _, here, verdict = said(ascending=6.0, descending=5.0)
    # Compared in the one cell that is measured here.
    assert theirs == "1.284 (1.28 to 1.28; 1 cell)" and model.startswith("1.9")
    assert (here, verdict) == ("1.200 (1.20 to 1.20; 1 cell)", "holds |")
    assert said(ascending=5.0, descending=5.0)[-1] == "no difference here |"
    assert said(ascending=5.0, descending=6.0)[-1] == "slower here |"
    assert said(ascending=5.0)[-2:] == ["-", "not measured |"]


def test_price_and_bits_in_the_papers_terms():
    from bench import paper
    found = _paper_records(ascending=5.0, unordered=4.0)
    assert "here up to 20.0% of ours" in paper.cost_text(found)
    assert "1 of 1 deterministic" in paper.cost_text(found)
    assert "not measured" in paper.cost_text(found[:1])


def test_reports_without_a_gpu(tmp_path, capsys, monkeypatch):
    # What a run on a rented card brought home must be reported anywhere.
    pytest.importorskip("matplotlib")
    from bench import cells, model, paper, records, schedules
    results, picture = tmp_path / "card.json", tmp_path / "paper.svg"
    found = _records(Costs(1.0, 0.2, 0.0, 2, "pipelined"), 0.2, 3.0)
    records.write(results, found)
    assert schedules.main(["--no-measure", "--json", str(results)]) == 0
    text = capsys.readouterr().out
    assert "0 of 12 differ by more than 10%" in text and "is not known" in text
    assert model.is_of(model.read(results), found)
    monkeypatch.setattr(model, "fit", lambda *_: pytest.fail("the model was made already"))
    assert paper.main(["--no-measure", "--json", str(results), "--plot", str(picture)]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines()
                if line.startswith(("| 64 |", "| 128 |"))]) == len(cells.ALL)
    assert picture.read_bytes().startswith(b"<?xml")
    with pytest.raises(InvalidInputError, match="measure first"):
        schedules.main(["--no-measure", "--json", str(tmp_path / "none.json")])


def test_model_file_is_small_and_finite():
    from bench import model, records
    path = model.path_of(records.RESULTS)
    if not path.is_file():
        pytest.skip("no model of the results")
    made = json.loads(path.read_text())
    assert all(math.isfinite(p["predicted_ms"]) and p["predicted_ms"] > 0
               for p in made["predictions"])
