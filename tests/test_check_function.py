"""`check --function`: faults of somebody else's attention are found and named."""

import itertools
import json
import textwrap

import pytest

from dashcupy import cli
from dashcupy.check import truth

ARGUMENTS = ["check", "--device", "cpu", "--len", "40", "--repeats", "3", "--head-dim", "16",
             "--dtype", "float32", "--bits", "repeats,alone,batch,strided"]
_module = itertools.count()


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Check a function of a module with this source; gives (status, record or None, stderr)."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(source, name="f", *more):
        module = f"user_module_{next(_module)}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        file = tmp_path / "record.json"
        spec = f"{module}:{name}" if name else module
        status = cli.main([*ARGUMENTS, "--function", spec, *more, "--json", str(file)])
        captured = capsys.readouterr()
        record = json.loads(file.read_text()) if file.exists() else None
        run.out = captured.out
        return status, record, captured.err.replace(module, "module")
    return run


def _faults(record):
    """(run, tensor, comparison) of every difference, and (run, tensor, "values") of every error."""
    found = set()
    for case in record["cases"]:
        for run in case["runs"]:
            for tensor in run["tensors"]:
                found |= {(run["name"], tensor["name"], x["test"]) for x in tensor["differences"]}
                if not (tensor["report"]["max_error"] <= tensor["report"]["max_bound"]
                        and tensor["report"]["frobenius_error"]
                        <= tensor["report"]["frobenius_bound"]):
                    found.add((run["name"], tensor["name"], "values"))
    return found


# Attention over [batch, len, heads, head_dim] with a heads axis that is shared or not.
PLAIN = """
    import torch
    calls = []

    def f(q, k, v, causal=False, scale=None):
        calls.append(q.shape)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if causal:
            rows, keys = s.shape[-2:]
            s = s.masked_fill(torch.ones(rows, keys, dtype=bool).tril(keys - rows).logical_not(),
                              float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)
"""


def _changed(old, new):
    assert old in PLAIN
    return PLAIN.replace(old, new)


class TestTorch:
    """Functions of torch tensors with gradients by torch.autograd."""

    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch", reason="torch is not installed")

    # Products of whole matrices, in BLAS's order, depend on the batch: only repeats are promised.
    REPEATS = ("--bits", "repeats")

    @pytest.mark.parametrize("more", [(), ("--causal", "--kv-len", "50"), ("--kv-heads", "1")])
    def test_a_right_function_passes(self, checked, more):
        status, record, _ = checked(PLAIN, "f", *more, *self.REPEATS)
        assert status == 0 and record["ok"] and record["subject"].startswith("function user_module")
        assert [[t["name"] for t in run["tensors"]] for run in record["cases"][0]["runs"]] == [
            ["out"], ["dq", "dk", "dv"]]
        assert len(record["cases"]) == 4  # with another scale

    def test_other_names_of_the_arguments_and_no_scale(self, checked):
        source = _changed("causal=False, scale=None", "is_causal=False")
        source = source.replace("* scale", "/ 4").replace("if causal", "if is_causal")
        status, record, _ = checked(source, "f", "--causal", *self.REPEATS)
        assert status == 0 and len(record["cases"]) == 3  # the default scale alone
        status, _, error = checked(source, "f", "--scale", "0.3")
        assert status == 2 and "has no argument for it" in error

    def test_layout_with_heads_before_rows(self, checked):
        source = _changed('"bqhd,bkhd->bhqk"', '"bhqd,bhkd->bhqk"')
        source = source.replace('"bhqk,bkhd->bqhd"', '"bhqk,bhkd->bhqd"')
        source = source.replace("[2] // x.shape[2], dim=2", "[1] // x.shape[1], dim=1")
        status, record, _ = checked(source, "f", "--heads", "4", "--kv-heads", "2", "--layout",
                                    "bhsd", *self.REPEATS)
        assert status == 0 and not _faults(record)
        assert checked(source, "f", "--heads", "4", *self.REPEATS)[0] != 0  # without --layout

    def test_a_function_that_ignores_scale_is_found(self, checked):
        status, record, _ = checked(_changed("* scale", "* q.shape[-1] ** -0.5"), "f",
                                    *self.REPEATS)
        assert status == 1
        assert [case["ok"] for case in record["cases"]] == [True, True, True, False]
        assert {what for _, _, what in _faults(record)} == {"values"}
        assert "values   fails in 2 of 8: errors beyond their bounds" in checked.out

    def test_a_function_that_ignores_the_mask_is_found(self, checked):
        status, record, _ = checked(_changed("if causal", "if False"), "f", "--causal",
                                    *self.REPEATS)
        assert status == 1 and ("forward", "out", "values") in _faults(record)

    @pytest.mark.parametrize("kv_len", ["30", "50"])
    @pytest.mark.parametrize("offset, mask, other", [
        ("keys - rows", "causal", "top_left"), ("0", "causal_top_left", "bottom_right")])
    def test_the_alignment_of_the_mask_is_found(self, checked, kv_len, offset, mask, other):
        """With lengths that differ, a right function of the other alignment would fail."""
        asked = ("--causal", "--kv-len", kv_len, "--forward-only", "--bits", "none")
        # A bottom-right mask hides all of 30 keys from the first of 40 rows: NaN, by its softmax.
        source = _changed("tril(keys - rows)", f"tril({offset})").replace(
            "s.softmax(-1)", "s.softmax(-1).nan_to_num(0)")
        status, record, error = checked(source, "f", *asked)
        found = "top_left" if mask == "causal_top_left" else "bottom_right"
        assert status == 0 and f"is aligned {found} (relative error" in error
        assert {case["case"]["problem"]["mask"] for case in record["cases"]} == {mask}
        in_nan = source.replace(".nan_to_num(0)", "")
        assert f"is aligned {found} " in checked(in_nan, "f", *asked)[2]
        assert checked(source, "f", "--causal", other, *asked[1:])[0] == 1  # what is asked for

    def test_a_mask_of_no_alignment_is_still_wrong(self, checked):
        status, _, error = checked(_changed("if causal", "if False"), "f", "--causal", "--kv-len",
                                   "50", "--bits", "none")
        assert status == 1 and "is closest to bottom_right" in error

    def test_an_alignment_that_cannot_be_found_is_asked_for(self, checked, monkeypatch):
        monkeypatch.setattr(truth, "MAX_HEAD_SCORES", 1000)
        status, _, error = checked(PLAIN, "f", "--causal", "--kv-len", "50")
        assert status == 2 and "give --causal bottom_right or --causal top_left" in error
        broken = _changed("s.softmax(-1), v)", "no, v)")
        assert checked(broken, "f", "--causal", "--kv-len", "50")[2] == error, "called for nothing"
        assert checked(PLAIN, "f", "--causal", "top_left", "--kv-len", "50", *self.REPEATS)[0] == 0

    def test_a_function_that_is_not_deterministic_is_found(self, checked):
        # What a sum by atomics does: a gradient off by its last bit, now and then.
        source = _changed("return torch.einsum", "return Noise.apply(torch.einsum") \
            .replace("s.softmax(-1), v)", "s.softmax(-1), v))") + """
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            if len(calls) % 3 == 0:
                dx = torch.nextafter(dx, torch.full_like(dx, 9.0))
            return dx
        """
        status, record, _ = checked(source, "f", *self.REPEATS)
        assert status == 1 and _faults(record) and {
            (run, what) for run, _, what in _faults(record)} == {("backward", "repeats")}
        assert "repeats  fails in" in checked.out

    @pytest.mark.parametrize("old, new, words", [
        ("s.softmax(-1), v)", "s.softmax(-1), v)[:, :-1]",
         "returned out of shape (2, 39, 2, 16) and dtype float32, expected shape (2, 40, 2, 16)"),
        ("s.softmax(-1), v)", "s.softmax(-1), v).double()", "dtype float64, expected"),
        ("return torch.einsum", "return s.shape, torch.einsum", "returned a Size as out"),
        ("s.softmax(-1), v)", "s.softmax(-1), v).detach()", "without a gradient (grad_fn)"),
        ("s.softmax(-1), v)", "no, v)", "raised NameError: name 'no' is not defined"),
        ("def f(q, k, v, ", "def f(q, k, v, w, ", "missing 1 required positional argument: 'w'"),
    ])
    def test_what_is_not_of_the_convention_is_named(self, checked, old, new, words):
        status, _, error = checked(_changed(old, new), "f")
        assert status == 2 and words in error and error.startswith("error: ")

    def test_a_function_without_gradients(self, checked):
        source = _changed("s.softmax(-1), v)", "s.softmax(-1), v).detach()")
        status, record, _ = checked(source, "f", "--forward-only", *self.REPEATS)
        assert status == 0
        assert [run["name"] for run in record["cases"][0]["runs"]] == ["forward"]

    def test_a_refusal_of_one_arrangement_is_told_and_no_failure(self, checked):
        source = _changed("calls.append(q.shape)", "assert q.is_contiguous(), 'only C order'")
        status, record, _ = checked(source, "f", "--bits", "repeats,strided")
        for run in record["cases"][0]["runs"]:
            assert "raised AssertionError: only C order" in run["tests"]["strided"]
        assert status == 0
        assert "strided not compared" in checked.out

    def test_a_function_that_writes_its_arguments_is_found(self, checked):
        source = _changed("calls.append(q.shape)", "v.data.mul_(2)")
        status, _, error = checked(source, "f", *self.REPEATS)
        assert status == 2 and "changes its argument v" in error

    def test_adapters_of_torch(self, capsys):
        arguments = [*ARGUMENTS, "--bits", "repeats", "--causal", "--kv-heads", "1"]
        for name in ("sdpa", "math"):
            assert cli.main([*arguments, "--function", f"torch:{name}"]) == 0
        capsys.readouterr()
        assert cli.main([*arguments, "--function", "torch:sdp"]) == 2
        assert "allowed: torch:sdpa, torch:math, torch:flash" in capsys.readouterr().err
        longer = [*arguments, "--function", "torch:math", "--kv-len", "50"]
        assert cli.main(longer) == 0
        assert "torch:math aligns its causal mask top_left" in capsys.readouterr().err
        assert cli.main([*longer, "--causal", "top_left"]) == 0
        assert cli.main([*longer, "--causal", "bottom_right"]) == 2
        assert "give --causal top_left" in capsys.readouterr().err


PAIR = """
    import numpy as np
    from dashcupy import attention, attention_backward

    def forward(q, k, v, causal=False, scale=None):
        return attention(q, k, v, causal=causal, scale=scale, return_lse=True)

    def backward(dout, q, k, v, out, lse, causal=False, scale=None):
        return attention_backward(dout, q, k, v, out, lse, causal=causal, scale=scale)

    class Both:
        forward, backward = staticmethod(forward), staticmethod(backward)

    instance = Both()
"""


@pytest.mark.parametrize("name", ["", "instance"])
def test_a_pair_of_numpy_functions_passes(checked, name):
    status, record, _ = checked(PAIR, name, "--causal", "--heads", "4", "--kv-heads", "2")
    assert status == 0 and not _faults(record) and len(record["cases"]) == 4
    assert [t["name"] for t in record["cases"][0]["runs"][0]["tensors"]] == ["out", "lse"]
    assert set(record["cases"][0]["runs"][1]["tests"].values()) == {"equal"}


@pytest.mark.parametrize("old, new, fault", [
    ("return attention_backward(", "return wrong(", ("backward", "dk", "values")),
    ("return attention(", "return other(", ("forward", "lse", "values")),
])
def test_wrong_values_of_a_pair_are_found(checked, old, new, fault):
    source = PAIR.replace(old, new) + """
    def wrong(*args, **options):
        dq, dk, dv = attention_backward(*args, **options)
        dk[0, 3] = 0
        return dq, dk, dv

    def other(*args, **options):
        out, lse = attention(*args, **options)
        return out, lse / np.float32(np.log(2))  # in base 2
    """
    status, record, _ = checked(source, "")
    assert status == 1 and fault in _faults(record)


@pytest.mark.parametrize("source, name, words", [
    ("f = 3", "f", "is of type int, and cannot be called"),
    ("f = 3", "g", "'g' is not there (there are: f)"),
    ("import nowhere", "f", "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
    ("raise SystemExit", "f", "cannot be imported (SystemExit"),  # status 0 would mean: all holds
    ("def f(q, k, v): raise SystemExit", "f", "f raised SystemExit"),
    ("class f:\n    pass", "f", "is a class: name an instance of it"),
    (PAIR + "\n    backward = lambda *a, **k: 1", "", "backward returned a int, expected a tuple"),
    (PAIR + "\n    forward = lambda *a, **k: [1]", "", "returned a int as out, expected a numpy."),
    (PAIR + "\n    backward = lambda *a, causal, scale: a[1:4][::-1]", "", "returned dq of shape"),
])
def test_what_is_no_attention_is_named(checked, source, name, words):
    status, _, error = checked(source, name, "--kv-len", "50")
    assert status == 2 and words in error and error.count("\n") == 1


def test_a_function_that_writes_its_arguments_is_found(checked):
    """The truth would be computed from other inputs than the results."""
    source = PAIR.replace("return attention(", "q *= 2; return attention(", 1)
    status, _, error = checked(source, "")
    assert status == 2 and "read-only" in error


def test_schedules_are_ours_alone(checked):
    status, _, error = checked(PAIR, "", "--schedule", "shift")
    assert status == 2 and "has no schedules" in error


def test_json_on_stdout_stays_json_whatever_the_function_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = PAIR.replace("    return attention(", "    print('hello')\n        return attention(")
    (tmp_path / "talkative.py").write_text(textwrap.dedent(source))
    assert cli.main([*ARGUMENTS, "--function", "talkative", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] and "hello" in captured.err
