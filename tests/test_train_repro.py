"""The training run on the CPU: it repeats to the bit, also from the middle; who parts is named."""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--size", "tiny", "--head-dim", "64", "--kv-heads", "1", "--seqlen", "48", "--batch", "4",
        "--steps", "4", "--hash-every", "2", "--device", "cpu", "--text", str(ROOT / "LICENSE")]


@contextlib.contextmanager
def _bench():
    """bench can be imported, and what a run sets for its whole process is put back afterwards."""
    threads, fill = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from bench.repro import settings
        reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        for name in settings.ENVIRONMENT:
            patch.setenv(name, "")  # of a name that is not set, delenv alone puts nothing back
            patch.delenv(name)
        torch.set_num_threads(1)  # a shared machine: threads that wait for each other take seconds
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced


@pytest.fixture(autouse=True)
def _environment():
    with _bench():
        yield


def test_nothing_is_left_to_other_tests():
    # Another algorithm of cuBLAS in the GPU tests of this process, another ring of NCCL.
    with _bench():
        from bench.repro import settings
        settings.apply()
    assert not settings.ENVIRONMENT.keys() & os.environ.keys()


def _main(*arguments):
    from bench.train_repro import main
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Records of runs: two alike, one from the middle, another seed, PyTorch's attention."""
    folder = tmp_path_factory.mktemp("runs")
    with _bench():
        assert _main(*TINY, "--json", folder / "a.json", "--checkpoint-every", 2,
                     "--checkpoint-dir", folder) == 0
        for name, more in {"b": [], "resumed": ["--resume", folder / "a-step2.pt"],
                           "seed": ["--seed", 1], "sdpa": ["--attention", "sdpa"]}.items():
            assert _main(*TINY, "--json", folder / f"{name}.json", *more) == 0
    return folder


def _read(path):
    return json.loads(path.read_text())


def test_two_runs_are_equal_to_the_bit(runs, capsys):
    assert _main("--compare", runs / "a.json", runs / "b.json") == 0
    assert "EQUAL (losses and gradient norms of steps 0 to 3, all gradients at 3 of them, " \
           "final weights)" in capsys.readouterr().out
    found = _read(runs / "a.json")
    assert [float.fromhex(x) for x in found["losses_hex"]] == found["losses"]
    assert list(found["gradients"]) == ["0", "2", "3"]
    assert found["gradients"]["2"].keys() == found["weights"].keys()
    assert len({*found["gradients"]["2"].values(), *found["gradients"]["0"].values()}) == 2 * 21
    # It learns: a run whose weights never change repeats, too.
    assert abs(found["losses"][0] - np.log(256)) < 0.3
    assert found["losses"][3] < found["losses"][0] - 0.2
    assert found["attention"]["schedule_used"] in found["attention"]["fingerprint"]
    assert found["deterministic"]["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert 0 < found["attention"]["share_of_step"] < 1


def test_resumed_run_ends_with_the_same_bits(runs):
    # An optimizer state, step or random state that a checkpoint forgets.
    assert _main("--compare", runs / "a.json", runs / "resumed.json") == 0
    whole, resumed = _read(runs / "a.json"), _read(runs / "resumed.json")
    assert resumed["first_step"] == 2 and resumed["losses"] == whole["losses"][2:]
    assert resumed["weights"] == whole["weights"]


def test_another_seed_differs_and_is_told_apart(runs, capsys):
    assert _main("--compare", runs / "a.json", runs / "seed.json") == 1
    text = capsys.readouterr().out
    assert "DIFFERENT" in text and "option: seed 0 and 1" in text
    assert "loss first differs at step 0: " in text and "it differs at 4 of 4 steps" in text
    assert "gradients first differ at step 0 (of those with digests) in head.weight" in text
    assert "21 of 21 tensors differ" in text


def test_the_tensor_that_the_backward_reaches_first_is_named(runs, tmp_path, capsys):
    # Who hears "embedding" looks for the fault in the wrong place: that one differs last.
    found = _read(runs / "a.json")
    for name in ("embedding.weight", "layers.0.mlp.up.weight", "layers.1.attention.q.weight"):
        found["gradients"]["2"][name] = "other"
    (tmp_path / "x.json").write_text(json.dumps(found))
    assert _main("--compare", runs / "a.json", tmp_path / "x.json") == 1
    text = capsys.readouterr().out
    assert "at step 2 (of those with digests) in layers.1.attention.q.weight" in text
    assert "3 of 21 tensors differ" in text and "loss" not in text.split("final weights)")[1]


def test_losses_agree_with_pytorchs_attention(runs):
    ours, sdpa = _read(runs / "a.json"), _read(runs / "sdpa.json")
    np.testing.assert_allclose(ours["losses"], sdpa["losses"], rtol=2e-6)
    np.testing.assert_allclose(ours["gradient_norms"], sdpa["gradient_norms"], rtol=2e-5)
    assert ours["attention"]["backward_mode"] == "deterministic"
    assert sdpa["attention"]["backward_mode"] == "default: not deterministic"
    assert sdpa["attention"]["backward"].startswith("ScaledDotProduct")


def test_peer_runs_outside_the_deterministic_switch_and_nothing_else_does(monkeypatch):
    # A peer that is slowed down, or a switch that stays off behind it.
    from bench.repro import attention
    seen = []

    class Peer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return dx

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention",
                        lambda q, k, v, **_: Peer.apply(q))
    torch.use_deterministic_algorithms(True)
    x = torch.ones(1, 3, 2, 4, requires_grad=True)
    before = x * 1
    before.register_hook(lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
    out = attention.Attention("sdpa", "auto")(before, before, before)
    assert torch.are_deterministic_algorithms_enabled()
    out.sum().backward()
    assert seen == [False, False, True] and torch.are_deterministic_algorithms_enabled()
    assert torch.equal(x.grad, torch.ones_like(x))
    modes = {name: attention.Attention("dashcupy", name).mode for name in ("auto", "unordered")}
    assert modes == {"auto": attention.DETERMINISTIC, "unordered": attention.DEFAULT}


def test_batches_depend_on_seed_and_step_alone():
    from bench.repro import data
    text = data.Text(np.arange(200, dtype=np.uint8), "numbers", 1)
    found = data.batch(text, 5, 7, 4, 10)
    assert found.shape == (4, 11) and found.dtype == np.int64
    # Written down: another generator or NumPy would make old checkpoints go on differently.
    assert found[:, 0].tolist() == [96, 9, 112, 160]
    assert np.array_equal(found - found[:, :1], np.tile(np.arange(11), (4, 1)))
    data.batch(text, 5, 8, 4, 10)
    assert np.array_equal(data.batch(text, 5, 7, 4, 10), found)
    assert not np.array_equal(data.batch(text, 6, 7, 4, 10), found)
    assert not np.array_equal(data.batch(text, 5, 8, 4, 10), found)


def test_text_is_the_library_in_a_fixed_order(tmp_path, monkeypatch):
    from bench.repro import data
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert data.read().content.tobytes() == b"<a.py><a/z.py><b.py>"
    assert data.read(tmp_path / "a").content.tobytes() == b"<a/notes.txt><a/z.py>"
    assert data.read(tmp_path / "b.py").describe()["bytes"] == 6


def test_progress_is_plain_lines_where_nobody_watches(capsys):
    assert _main(*TINY, "--attention", "sdpa") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("0.5 M parameters, float32, attention sdpa, 4 x 48 bytes a step of")
    assert [line.split("  ")[0] for line in lines[1:5]] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    assert all("  loss " in line and line.endswith(" tokens/s") for line in lines[1:5])
    assert "\033" not in captured.out + captured.err and "%" in lines[5]


@pytest.mark.parametrize("arguments, words", [
    (["--attention", "sdpa", "--schedule", "ascending"], "leave it out with --attention sdpa"),
    (["--schedule", "shift"], "not defined for the causal mask"),
    (["--attention", "cudnn", "--device", "cpu"], "give --attention dashcupy or sdpa"),
    (["--text", "no/such/place"], "there is no such file or folder"),
    (["--text", str(ROOT / "cuda_src" / "ptx")], "no file in it ends in .py, .txt, .md, .rst"),
    ([*TINY, "--text", str(ROOT / ".gitignore"), "--seqlen", "4000"], "a smaller --seqlen"),
    ([*TINY, "--kv-heads", "3"], "--kv-heads 3 does not divide the 2 q heads"),
    (["--parallel", "ddp", "--device", "cpu"], "torchrun --nproc-per-node 2"),
    (["--plot", "x.png"], "give --compare A B"),
    (["--summary", "x.json"], "give --compare A B"),
    (["--compare", "none.json", "none.json"], "none.json cannot be read as a record"),
    ([*TINY, "--resume", str(ROOT / "README.md")], "no checkpoint can be read there"),
    ([*TINY, "--json", str(ROOT)], "cannot be written: Is a directory"),
    ([*TINY, "--checkpoint-every", "2", "--checkpoint-dir", str(ROOT / "LICENSE")],
     "LICENSE/train-step2.pt cannot be written"),
])
def test_refusals_say_what_to_do(arguments, words, capsys):
    """Before the first step: what cannot be written must not cost a whole run."""
    assert _main(*arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and not captured.out


@pytest.mark.parametrize("arguments, words", [
    (["--lr", "nan"], "allowed: a finite number > 0"), (["--lr", "0"], "finite number > 0"),
    (["--hash-every", "-3"], "-3 (allowed: whole numbers from 1 on)")])
def test_numbers_out_of_range_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        _main(*TINY, *arguments)
    assert words in capsys.readouterr().err


def test_parts_of_a_record_or_checkpoint_are_refused(runs, tmp_path, capsys):
    """Not with status 1, which means that the runs differ."""
    part = json.loads((runs / "a.json").read_text())
    del part["weights"]
    (tmp_path / "part.json").write_text(json.dumps(part))
    assert _main("--compare", runs / "a.json", tmp_path / "part.json") == 2
    assert "not a whole record (KeyError: 'weights')" in capsys.readouterr().err
    (tmp_path / "empty.pt").touch()
    torch.save({"config": {}}, tmp_path / "part.pt")
    for name in ("empty.pt", "part.pt"):
        assert _main(*TINY, "--resume", tmp_path / name) == 2
        assert "no checkpoint can be read there" in capsys.readouterr().err


def test_checkpoint_of_another_run_is_refused(runs, capsys):
    # Going on with another seed or text would give a record that nobody can repeat.
    assert _main(*TINY, "--seed", 3, "--resume", runs / "a-step2.pt") == 2
    assert "seed was 0, is 3" in capsys.readouterr().err
    assert _main(*TINY, "--resume", runs / "a-step4.pt") == 2
    assert "4 steps are done" in capsys.readouterr().err


def test_processes_without_a_parallel_mode_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _main(*TINY) == 2
    assert "give --parallel ddp or fsdp2" in capsys.readouterr().err


def test_picture(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.svg"
    assert _main("--compare", runs / "a.json", runs / "resumed.json", "--compare",
                 runs / "a.json", runs / "seed.json", "--plot", path) == 1
    text = path.read_text()
    assert "dashcupy and dashcupy, resumed at step 2: 0 at every step, all bits equal" in text
    assert "dashcupy, two runs: differ at 4 of 4 steps" in text


def test_summary_says_in_short_what_the_records_say(runs, tmp_path, capsys):
    # A summary that calls runs equal that are not, or that loses where they part.
    from bench import training
    found = _read(runs / "seed.json")
    found["losses"][0] = _read(runs / "a.json")["losses"][0]
    (tmp_path / "x.json").write_text(json.dumps(found))
    path = training.path_of(tmp_path / "card.json")
    assert _main("--compare", runs / "a.json", runs / "b.json", "--compare", runs / "a.json",
                 runs / "resumed.json", "--compare", runs / "a.json", tmp_path / "x.json",
                 "--summary", path) == 1
    made = training.read(tmp_path / "card.json")
    a, b, resumed, x = made["runs"].values()
    assert (a["gradients"], a["weights"], a["losses"]) == (b["gradients"], b["weights"],
                                                          b["losses"])
    assert resumed["gradients"] == {step: a["gradients"][step] for step in ("2", "3")}
    assert resumed["weights"] == a["weights"] != x["weights"]
    assert not {*a["gradients"].values()} & {*x["gradients"].values()}
    assert (a["steps"], resumed["steps"], resumed["first_step"]) == (4, 2, 2)
    assert [one["equal"] for one in made["comparisons"]] == [True, True, False]
    assert {one["what"]: (one["step"], one["tensor"], one["n_differ"], one["n"])
            for one in made["comparisons"][2]["differences"]} == {
        "loss": (1, None, 3, 4), "gradient norm": (0, None, 4, 4),
        "gradients": (0, "head.weight", 21, 21),
        "final weights": (None, "embedding.weight", 21, 21)}
    apart = max(abs(p - q) for p, q in zip(_read(runs / "a.json")["losses"], found["losses"]))
    text = training.short(made)
    assert "- **dashcupy and dashcupy, resumed at step 2: all bits equal** (losses and gradient " \
           "norms of steps 2 to 3, all gradients at 2 of them, final weights)." in text
    assert f"loss first at step 1, at 3 of 4 steps, by {apart:.2g} at most; final weights in 21 " \
           f"of 21 tensors)" in text
    assert f"attention {100 * a['attention']['share_of_step']:.0f} and " in text
    table = training.table(made).splitlines()[-1]
    assert f"| {a['final_loss']:.9g}, {x['final_loss']:.9g} | {a['step_ms_median']:.1f}, " in table
    capsys.readouterr()
    (tmp_path / "a.json").write_bytes((runs / "b.json").read_bytes())
    assert _main("--compare", runs / "a.json", tmp_path / "a.json", "--summary", path) == 2
    assert "some are the same; rename them" in capsys.readouterr().err


def test_interrupted_write_leaves_the_old_file(tmp_path):
    from bench.repro import record
    path = tmp_path / "x.pt"
    path.write_text("old")

    def half(file):
        file.write(b"ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.write_at_once(path, half)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize("mode, device", [
    ("ddp", "cpu"), ("fsdp2", "cpu"),
    # Two processes on one GPU, or one each where there are two.
    *(pytest.param(mode, "cuda", marks=pytest.mark.gpu) for mode in ("none", "ddp", "fsdp2")),
])
def test_fresh_processes_repeat_to_the_bit(mode, device, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, more in {"a": ["--checkpoint-every", "2", "--checkpoint-dir", str(tmp_path)],
                       "b": [], "c": ["--resume", str(tmp_path / "a-step2.pt")]}.items():
        subprocess.run([sys.executable, *(torchrun if mode != "none" else []), "-m",
                        "bench.train_repro", *TINY, "--device", device, "--parallel", mode,
                        "--json", str(tmp_path / f"{name}.json"), *more],
                       cwd=ROOT, env=environment, check=True, timeout=300)
    assert _main("--compare", tmp_path / "a.json", tmp_path / "b.json", "--compare",
                 tmp_path / "a.json", tmp_path / "c.json") == 0
    config = _read(tmp_path / "a.json")["config"]
    assert (config["processes"], config["device"]) == (1 if mode == "none" else 2, device)
