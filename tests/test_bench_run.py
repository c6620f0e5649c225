"""The bench's run without a GPU: what is timed, compared, recorded, left out and taken over."""

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dashcupy import cli
from dashcupy.errors import DeviceError, InvalidInputError, UnsupportedError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def fake_gpu(monkeypatch):
    """Everything that would touch a GPU; results of functions are plain numbers."""
    from bench import harness, ours, timing
    state = SimpleNamespace(changing=set(), built=[], timed=[])

    @contextlib.contextmanager
    def watch_clocks():
        yield lambda: "clocks"

    def measure(calls, iters, warmup):
        state.timed.append(tuple(calls))
        return {name: timing.Timing(1.0 + i, 0.1, 5.0) for i, name in enumerate(calls)}
    environment = {"device": "NVIDIA H200", "driver": "580", "cuda": "13.0", "versions": {},
                   "date": "2026-01-01"}
    # Its timer wants a stderr that is a file.
    monkeypatch.setattr(harness, "faulthandler", SimpleNamespace(
        dump_traceback_later=lambda *_, **__: None, cancel_dump_traceback_later=lambda: None))
    monkeypatch.setattr(harness, "_require_gpu", lambda: 0)
    monkeypatch.setattr(harness, "_capability", lambda: (9, 0))
    monkeypatch.setattr(timing, "environment", lambda: dict(environment))
    monkeypatch.setattr(timing, "warm_card", lambda: None)
    monkeypatch.setattr(timing, "watch_clocks", watch_clocks)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "relative_error", lambda got, truth: abs(got - truth))
    monkeypatch.setattr(timing, "same_bits", lambda call: call() not in state.changing)
    monkeypatch.setattr(ours, "compile_ahead", lambda plans, capability: state.built.extend(plans))
    monkeypatch.setattr(ours, "kernel_of", lambda plan, device: {"name": plan.config.kernel})
    return state


def _direction(results, peers=("fa2",)):
    """A backward whose functions return these numbers, by schedule or peer."""
    from bench import harness, ours

    def variants(cell, options, plans):
        found = [harness.Variant(peer, "default", lambda peer=peer: (results[peer],))
                 for peer in peers]
        for name, plan in plans.items():
            mode = "deterministic" if ours.is_deterministic(name) else "default"
            found.append(harness.Variant("dashcupy", mode, lambda name=name: (results[name],),
                                         name, plan))
        return found
    return harness.Direction(
        "backward", lambda cell, options: ours.chosen_schedules(options.schedules, cell.causal),
        variants, 0.02)


def _options(*arguments, schedules="ascending,descending"):
    from bench import harness
    return harness.parser("backward", "", schedules).parse_args(
        ["--cells", "d128-causal-512", "--peers", "fa2", *map(str, arguments)])


def test_a_wrong_kernel_gets_no_record(fake_gpu, capsys, tmp_path):
    from bench import harness, records
    path = tmp_path / "r.json"
    found, bad = harness.run(_direction({"fa2": 1.0, "ascending": 1.01, "descending": 1.5}),
                             _options("--json", path))
    assert bad and [(r["peer"], r["schedule"]) for r in found] == [
        ("dashcupy", "ascending"), ("fa2", None)]
    assert "descending] WRONG" in capsys.readouterr().out
    assert records.read(path) == found
    assert fake_gpu.timed == [("ours[ascending]", "fa2")]
    # The forward runs before, so its kernels are compiled ahead, too.
    assert {plan.direction for plan in fake_gpu.built} == {"forward", "backward"}


def test_bits_may_change_only_without_a_promise(fake_gpu, capsys):
    # A kernel that promises nothing failed the run, or one that breaks its promise passed.
    from bench import harness
    fake_gpu.changing = {(1.0,)}
    results = {"fa2": 1.0, "ascending": 1.001, "descending": 1.0}
    found, bad = harness.run(_direction(results), _options())
    assert bad and "ours[descending]: BITS CHANGE" in capsys.readouterr().out
    results = {"fa2": 1.0, "ascending": 1.001, "unordered": 1.0}
    found, bad = harness.run(_direction(results), _options(schedules="ascending,unordered"))
    assert not bad
    assert {r["schedule"]: (r["mode"], r["same_bits"]) for r in found if r["schedule"]} == {
        "ascending": ("deterministic", True), "unordered": ("default", False)}


def test_reuse_times_only_what_is_missing(fake_gpu, tmp_path, capsys, monkeypatch):
    # The same cells measured twice, or times of other code taken for those of this one.
    from bench import harness
    path = tmp_path / "r.json"
    direction = _direction({"fa2": 1.0, "ascending": 1.0, "descending": 1.0})
    harness.run(direction, _options("--json", path))
    again, _ = harness.run(direction, _options("--json", path, "--reuse", schedules="descending"))
    assert len(fake_gpu.timed) == 1 and len(again) == 3
    more = _options("--json", path, "--reuse", "--cells", "d128-causal-*12,d128-full-512",
                    schedules="descending")
    harness.run(direction, more)
    assert len(fake_gpu.timed) == 2
    monkeypatch.setattr(harness, "source_digest", lambda: "other code")
    harness.run(direction, _options("--json", path, "--reuse"))
    assert len(fake_gpu.timed) == 3


def test_sustained_times_are_shown_and_not_kept(fake_gpu, tmp_path, capsys, monkeypatch):
    from bench import harness, timing
    asked = []

    def sustained(calls, seconds):
        asked.append((tuple(calls), seconds))
        return {name: timing.Timing(2.0, 0.0, 5.0) for name in calls}
    monkeypatch.setattr(timing, "sustained", sustained)
    direction = _direction({"fa2": 1.0, "ascending": 1.0, "descending": 1.0})
    found, _ = harness.run(direction, _options("--sustained", 0.5))
    assert asked == [(("ours[ascending]", "ours[descending]", "fa2"), 0.5)] and not fake_gpu.timed
    assert {r["ms"] for r in found} == {2.0} and "ascending 2.000 ms" in capsys.readouterr().out
    with pytest.raises(InvalidInputError, match="--sustained and --json: .* leave out one"):
        harness.run(direction, _options("--sustained", 1, "--json", tmp_path / "r.json"))
    assert len(asked) == 1 and not (tmp_path / "r.json").exists()
    for text in ("0", "-1", "nan", "120", "long"):
        with pytest.raises(SystemExit):
            _options("--sustained", text)
        assert f"{text} (allowed: more than 0, less than 120)" in capsys.readouterr().err


@pytest.fixture
def fake_clock(monkeypatch):
    """A PyTorch that notes what is asked of it; a tick passes at each look at the clock."""
    from bench import timing
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 60.0
    ticks = itertools.count()
    fake = SimpleNamespace(Event=Event, synchronize=lambda: log.append("done"), _sleep=lambda _: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    return log


def test_no_function_always_follows_the_same_one(fake_clock):
    """A kernel behind one that takes little power was 7 % faster than the same one elsewhere."""
    from bench import timing
    names = "abcdef"
    found = timing.measure({name: lambda name=name: fake_clock.append(name) for name in names},
                           iters=15, warmup=1)
    assert found["a"] == timing.Timing(60.0, 0.0, 1e6)
    order = [entry for entry in fake_clock if entry in names]
    rounds = [order[i:i + 6] for i in range(6, len(order), 6)]  # the first is the warm-up
    assert len(rounds) == 15 and all(sorted(one) == list(names) for one in rounds)
    followed = {name: {one[i - 1] for one in rounds for i in range(1, 6) if one[i] == name}
                for name in names}
    assert all(len(before) >= 4 for before in followed.values()), followed


def test_sustained_calls_follow_one_another(fake_clock):
    """In each shift as many untimed calls as timed ones, between two events; the mean of those."""
    from bench import timing
    log = fake_clock
    found = timing.sustained({"a": lambda: log.append("call")}, 48)
    # A call took two ticks: a quarter of 48 seconds is three untimed calls and three timed ones.
    shift = ["call"] * 3 + ["event"] + ["call"] * 3 + ["event"]
    assert log == ["call", "done"] * 2 + shift * 4 + ["done"]
    assert found == {"a": timing.Timing(20.0, 0.0, 1e6)}


def test_what_no_kernel_serves_is_skipped_with_a_reason(fake_gpu, capsys, monkeypatch):
    from bench import harness, ours
    make_plan = ours.make_plan

    def refuse(problem, direction, capability, schedule):
        if schedule == "descending":
            raise UnsupportedError("bwd_sm90 has no such schedule")
        return make_plan(problem, direction, capability, schedule)
    monkeypatch.setattr(ours, "make_plan", refuse)
    found, bad = harness.run(_direction({"fa2": 1.0, "ascending": 1.0}), _options())
    assert "skipped descending: bwd_sm90 has no such schedule" in capsys.readouterr().err
    assert not bad and [r["schedule"] for r in found] == ["ascending", None]


def test_names_are_checked():
    from bench import ours, peers
    assert ours.chosen_schedules("shift,auto", causal=True) == ["auto"]
    assert ours.chosen_schedules("all", causal=False) == [
        "auto", "ascending", "descending", "shift", "shortest_first", "unordered"]
    with pytest.raises(InvalidInputError, match="shift"):
        ours.chosen_schedules("shit", causal=False)
    assert peers.choose("none") == [] and set(peers.choose("usual")) < set(peers.choose("all"))
    with pytest.raises(InvalidInputError, match="fa2, fa2_det"):
        peers.choose("fa2,fa9")
    for choose in (peers.choose, lambda text: ours.chosen_schedules(text, True)):
        with pytest.raises(InvalidInputError, match="''"):  # nothing asked for, nothing timed
            choose("")
    assert {peers.mode_of(name) for name in ("fa2_det", "math_det")} == {"deterministic"}
    assert peers.mode_of("triton") == "default"


def test_a_peer_that_is_not_there_is_named_with_the_reason(tmp_path):
    from bench import peers
    file = tmp_path / "tutorial.py"
    file.write_text("def attention(q, k, v, causal, sm_scale):\n    return q\n")
    assert peers.why_not("triton", "backward", file) == ""
    assert "--triton" in peers.why_not("triton", "backward", None)
    assert "not a Python file" in peers.why_not("triton", "backward", tmp_path / "none.py")
    assert "flash_attn_interface" in peers.why_not("fa3", "forward", None)
    assert "its forward is that of fa3" in peers.why_not("fa3_det", "forward", None)
    assert peers.why_not("fa2", "backward", None) == ""  # the first call tells


def test_torch_peers_agree_with_one_another():
    # A layout that is turned once too often gives plausible times of another problem.
    torch = pytest.importorskip("torch")
    from bench import peers
    q, k, v, dout = torch.randn(4, 2, 40, 3, 16, dtype=torch.float64)
    grads = [peers.backward("math_det", dout, q, k, v, True)()]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1]) / 4
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2])
    out.backward(dout)
    assert torch.allclose(peers.forward("math", q, k, v, True)()[0], out)
    for got, leaf in zip(grads[0], leaves, strict=True):
        assert torch.allclose(got, leaf.grad)
    assert not torch.are_deterministic_algorithms_enabled()


def test_command_line_runs_the_scripts(monkeypatch, capsys, tmp_path):
    """From the checkout; a folder of the user's that is called bench is not taken for ours."""
    assert cli.main(["bench", "show", "--results", str(tmp_path / "none.json")]) == 1
    assert cli.main(["bench", "cpu", "--length", "64", "--rounds", "1"]) == 0
    assert "ours / plain" in capsys.readouterr().out
    assert cli.main(["bench", "cpu", "--schedule", "unordered"]) == 2
    assert "this problem is computed on the CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "cpu", "--heads", "0"])
    assert "argument --heads: 0 (allowed: whole numbers from 1 on)" in capsys.readouterr().err
    harness = sys.modules["dashcupy.bench.harness"]

    def none():
        raise DeviceError("no GPU that PyTorch can use: nothing to time")
    monkeypatch.setattr(harness, "_require_gpu", none)
    for script in ("forward", "backward", "schedules", "paper"):
        assert cli.main(["bench", script, "--quick"]) == 2
        assert capsys.readouterr().err == "error: no GPU that PyTorch can use: nothing to time\n"
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "cpu.py").write_text("raise SystemExit('the wrong bench')\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n"
         "from dashcupy import cli; sys.exit(cli.main(['bench', 'cpu', '--length', '64']))"],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "ours / plain" in done.stdout, done.stderr


def test_variants_call_what_their_labels_say(monkeypatch):
    # A schedule that is timed under the name of another, or a mask that is forgotten.
    import dashcupy
    from bench import backward, cells, forward, harness, ours
    cell, options = cells.Cell(64, True, 512), _options("--peers", "none")
    arrays = np.random.default_rng(0).standard_normal((4, 1, 300, 1, 64), np.float32)
    monkeypatch.setattr(harness, "draw", lambda cell: tuple(arrays))
    q, k, v, dout = arrays
    out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
    asked = ["descending", "symmetric_shift"]
    found = backward.variants(cell, options, ours.plan_or_skip(cell, "backward", (9, 0), asked))
    assert [variant.label for variant in found] == [f"ours[{name}]" for name in asked]
    for variant, name in zip(found, asked, strict=True):
        wanted = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True, schedule=name)
        assert all(map(np.array_equal, variant.call(), wanted))
        assert variant.plan.schedule == name
    variant, = forward.variants(cell, options, ours.plan_or_skip(cell, "forward", (9, 0), [None]))
    assert all(map(np.array_equal, variant.call(), (out, lse)))
    assert (variant.label, variant.plan.schedule) == ("ours", None)


def test_kernels_are_compiled_once_each_before_the_clock_runs(monkeypatch, capsys):
    # Compilation inside a cell, one kernel after the other, on a card that is paid by the minute.
    from bench import cells, ours
    from dashcupy.errors import CompileError
    built = []

    def build(kernel, defines, arch):
        built.append((kernel, defines))
        if "bwd" not in kernel:
            raise CompileError("no")
    monkeypatch.setattr(ours.modules, "build", build)
    monkeypatch.setattr(ours.nvrtc, "default_library", lambda: None)
    monkeypatch.setattr(ours.nvrtc, "choose_arch", lambda *_: "sm_90a")
    asked = ours.chosen_schedules("all", causal=True)
    plans = [plan for length in (512, 1024) for cell in [cells.Cell(128, True, length)]
             for plan in (*ours.plan_or_skip(cell, "backward", (9, 0), asked).values(),
                          *ours.plan_or_skip(cell, "forward", (9, 0), [None]).values())]
    ours.compile_ahead(plans, (9, 0))
    assert len(built) == len(set(built))
    assert [kernel for kernel, _ in built].count("bwd_sm90") == len(asked) - 1  # auto is one
    assert "FAILED: fwd_sm90: CompileError" in capsys.readouterr().err


def test_record_names_what_the_model_must_know(monkeypatch):
    from bench import cells, ours
    cell = cells.Cell(128, True, 8192)
    plan = ours.plan_or_skip(cell, "backward", (9, 0), ["auto"])["auto"]
    monkeypatch.setattr(ours.modules, "load", lambda *_, **__: SimpleNamespace(function=7))
    monkeypatch.setattr(ours, "resident_workers", lambda *_: 200)
    assert ours.kernel_of(plan, 0) == {
        "name": plan.config.kernel, "q_tile": plan.config.q_tile, "kv_tile": plan.config.kv_tile,
        "head_group": ours.head_group(plan), "resident": 200}
    forward = ours.plan_or_skip(cell, "forward", (9, 0), [None])[None]
    assert ours.kernel_of(forward, 0)["resident"] is None


@pytest.mark.parametrize("call", [
    "runpy.run_module('bench.train_repro', run_name='__main__')",
    "sys.exit(__import__('dashcupy.cli').cli.main(['bench', 'train_repro']))"])
def test_a_training_run_without_pytorch_is_one_line(call):
    """The script imports PyTorch before it can look at its options."""
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy, sys; sys.modules['torch'] = None; {call}"],
        cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs PyTorch, which is not installed; pip install torch" in done.stderr
