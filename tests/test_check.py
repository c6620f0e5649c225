"""The check command finds what it is there for: wrong values and changing bits."""

import itertools
import json
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from dashcupy import cli, config, schedules
from dashcupy.check import cases, command, device, inputs, process, run, subject, truth
from dashcupy.errors import HangError, UnsupportedError
from dashcupy.problem import Problem
from dashcupy.reference import attention_reference

SMALL = ["check", "--device", "cpu", "--batch", "2", "--len", "70", "--kv-len", "90", "--heads",
         "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float16", "--causal",
         "--repeats", "2"]
# All comparisons of bits on the CPU but the one that starts a process.
BITS = ["--bits", "repeats,alone,batch,strided"]


def _check(tmp_path, *more) -> tuple[int, dict]:
    file = tmp_path / "record.json"
    status = cli.main([*SMALL, *BITS, *more, "--json", str(file)])
    return status, json.loads(file.read_text())


def _tensors(record):
    return [tensor for case in record["cases"] for run in case["runs"] for tensor in run["tensors"]]


def test_own_shape_passes_and_the_record_tells_all(tmp_path, capsys):
    status, record = _check(tmp_path)
    assert status == 0 and record["ok"] is True
    assert [case["case"]["inputs"] for case in record["cases"]] == [
        "normal", "deep", "one_hot", "normal"]
    assert [case["case"]["problem"]["scale"] for case in record["cases"]] == [.25, .25, .25, .125]
    assert record["cases"][0]["case"]["problem"] == {
        "batch": 2, "q_len": 70, "kv_len": 90, "n_q_head": 4, "n_kv_head": 2, "head_dim": 16,
        "dtype": "float16", "mask": "causal", "scale": 0.25}
    for case in record["cases"]:
        assert [run["name"] for run in case["runs"]] == [
            "forward", *(name for name in schedules.names() if schedules.supports(name, "causal"))]
        assert [tensor["name"] for tensor in case["runs"][0]["tensors"]] == ["out", "lse"]
        assert case["reference_heads"] == case["heads"] == 4 and len(case["inputs_digest"]) == 64
        for run_ in case["runs"]:
            assert run_["tests"] == dict.fromkeys(("repeats", "alone", "batch", "strided"), "equal")
    for tensor in _tensors(record):
        assert 0 <= tensor["report"]["max_error"] <= tensor["report"]["max_bound"]
        assert len(tensor["digest"]) == 64 and tensor["differences"] == []
    assert record["device"]["kind"] == "cpu" and record["info"]["versions"]["numpy"]
    text = capsys.readouterr().out
    assert "--device cpu was given" in text and "all 24 checks hold" in text
    assert "\033" not in text and max(map(len, text.splitlines())) <= 100


def test_json_to_stdout_is_nothing_but_json(capsys):
    assert cli.main([*SMALL, *BITS, "--schedule", "auto", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in record["cases"][0]["runs"]] == ["forward", "auto"]


def _spoil(monkeypatch, change):
    """Pass the gradients of every call through ``change(number of the call, dq, dk, dv)``."""
    real, calls = subject.attention_backward, itertools.count()
    monkeypatch.setattr(subject, "attention_backward",
                        lambda *args, **options: change(next(calls), *real(*args, **options)))


def _differences(record):
    return {(tensor["name"], found["test"]) for tensor in _tensors(record)
            for found in tensor["differences"]}


def test_one_changed_bit_in_a_repeat_is_found_and_located(tmp_path, monkeypatch, capsys):
    def change(call, dq, dk, dv):
        if call == 1:
            dk.view(np.uint16)[1, 5, 1, 3] ^= 1
        return dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending", "--repeats", "4")
    assert status == 1 and record["ok"] is False
    assert _differences(record) == {("dk", "repeats")}
    found, = record["cases"][0]["runs"][1]["tensors"][1]["differences"]
    assert (found["n_bad"], found["n_call"], found["count"]) == (1, 3, 1)
    assert found["size"] == 2 * 90 * 2 * 16 and found["index"] == [1, 5, 1, 3]
    assert int(found["got"], 16) ^ int(found["expected"], 16) == 1 and len(found["got"]) == 6
    assert found["place"] == "kv tile 0, which adds q tiles 0"
    assert record["cases"][0]["runs"][1]["tests"]["repeats"] == "different"
    text = " ".join(capsys.readouterr().out.split())
    assert ("dk: other bits: repeats (1 of 3 calls): 1 of 5760 elements, first at [1, 5, 1, 3]: "
            f"{found['got']}, not {found['expected']}; kv tile 0") in text


def test_the_place_of_a_difference_tells_the_order_of_its_sum():
    ours = subject.Dashcupy(device.choose_place("cpu"))
    problem = Problem(1, 600, 1200, 1, 1, 64, "float16", "full", 0.125)  # tiles of 256 and 512 rows
    assert ours.locate(problem, "shortest_first", "dq", (0, 599, 0, 3)) == (
        "q tile 2, which adds kv tiles 2, 1, 0 in this order")
    assert ours.locate(problem, "descending", "dv", (0, 512, 0, 3)) == (
        "kv tile 1, which adds q tiles 2, 1, 0 in this order")
    assert ours.locate(problem, "forward", "lse", (0, 0, 256)) == "q tile 1"


@pytest.mark.parametrize("test, spoils", [
    ("alone", lambda dq, n_batch: dq.shape[0] < n_batch),
    ("batch", lambda dq, n_batch: dq.shape[0] > n_batch),
])
def test_bits_that_depend_on_the_batch_are_found(tmp_path, monkeypatch, capsys, test, spoils):
    def change(call, dq, dk, dv):
        return np.nextafter(dq, np.float16(np.inf)) if spoils(dq, 2) else dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1 and _differences(record) == {("dq", test)}
    assert f"dq: other bits: {test}" in capsys.readouterr().out


def test_bits_that_depend_on_strides_are_found(tmp_path, monkeypatch):
    real = subject.attention

    def attention(q, k, v, **options):
        out, lse = real(q, k, v, **options)
        views = not q.flags.c_contiguous and q.shape[0] == 2
        return out, np.nextafter(lse, np.float32(9)) if views else lse
    monkeypatch.setattr(subject, "attention", attention)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1 and ("lse", "strided") in _differences(record)
    assert {test for _, test in _differences(record)} == {"strided"}


def test_bits_that_change_under_load_are_found(tmp_path, monkeypatch):
    before = threading.active_count()

    def change(call, dq, dk, dv):
        return dq, dk, -dv if threading.active_count() > before else dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending", "--stress")
    assert status == 1 and _differences(record) == {("dv", "load")}
    assert threading.active_count() == before  # the load has ended


def test_another_process_computes_the_same_bits_and_a_wrong_digest_is_found(tmp_path, monkeypatch,
                                                                            capsys):
    real, records = process.run_process, []

    def run_process(arguments):
        records.append(real(arguments))
        if len(records) > 1:
            records[-1]["cases"][2]["runs"][1]["tensors"][0]["digest"] = "0" * 64
        return records[-1]
    monkeypatch.setattr(process, "run_process", run_process)
    only = ("--schedule", "auto", "--bits", "process", "--seed", "3")
    status, record = _check(tmp_path, *only)
    assert status == 0 and records[0]["settings"]["seed"] == 3
    assert all(run_["tests"] == {"process": "equal"} for case in record["cases"]
               for run_ in case["runs"])
    status, record = _check(tmp_path, *only)
    assert status == 1 and _differences(record) == {("dq", "process")}
    assert "dq: other bits: process: digest 0000000000000000, not " in capsys.readouterr().out


def test_a_second_process_that_fails_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(process, "OPTIONS", ("--repeats", "0"))
    assert cli.main([*SMALL, "--bits", "process"]) == 2
    assert "second process ended with status 2: error: --repeats 0" in capsys.readouterr().err


@pytest.mark.parametrize("wrong, report", [(np.nan, "nan"), (9.0, None)])
def test_a_wrong_value_is_found_and_a_nan_keeps_the_record_valid(tmp_path, monkeypatch, capsys,
                                                                 wrong, report):
    def change(call, dq, dk, dv):
        dv[-1, 40, -1, 2] = wrong
        return dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending", "--bits", "repeats,alone,strided")
    assert status == 1 and not _differences(record)
    bad = [tensor for tensor in _tensors(record) if not tensor["ok"]]
    assert {tensor["name"] for tensor in bad} == {"dv"}
    if report:
        assert bad[0]["report"]["max_error"] == report
    text = capsys.readouterr().out
    assert "FAIL ascending" in text and "dv: wrong values: max error" in text
    assert "4 of 8 checks FAILED; please report this" in text
    assert "values   fails in 4 of 8: errors beyond their bounds" in text


def test_a_hang_is_a_failure_and_the_other_schedules_go_on(tmp_path, monkeypatch, capsys):
    real = subject.attention_backward

    def backward(*args, schedule, **options):
        if schedule == "ascending":
            raise HangError("kv tile 3 gave up waiting for ticket 2")
        return real(*args, schedule=schedule, **options)
    monkeypatch.setattr(subject, "attention_backward", backward)
    status, record = _check(tmp_path)
    assert status == 1
    ok = {run_["name"]: run_["ok"] for run_ in record["cases"][0]["runs"]}
    assert not ok.pop("ascending") and ok and all(ok.values())
    assert "FAIL ascending: kv tile 3 gave up waiting" in capsys.readouterr().out


def _refuse(monkeypatch, name):
    real = subject.attention_backward

    def backward(*args, schedule, **options):
        if schedule == name:
            raise UnsupportedError("needs 64 CTAs resident together")
        return real(*args, schedule=schedule, **options)
    monkeypatch.setattr(subject, "attention_backward", backward)


def test_a_schedule_that_the_device_refuses_is_told_and_no_failure(tmp_path, monkeypatch, capsys):
    _refuse(monkeypatch, "ascending")
    status, record = _check(tmp_path)
    assert status == 0
    assert record["cases"][0]["runs"][1]["refused"] == "needs 64 CTAs resident together"
    text = capsys.readouterr().out
    assert "refused ascending: needs 64 CTAs" in text and "(4 refused, see above)" in text


def test_a_schedule_that_was_asked_for_must_run(tmp_path, monkeypatch, capsys):
    """Nothing of it was checked, and the status once was 0."""
    _refuse(monkeypatch, "ascending")
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1 and record["ok"] is False
    assert "FAIL ascending: needs 64 CTAs resident together" in capsys.readouterr().out


def _as_hopper(monkeypatch):
    """Let the check believe that it computes on a GPU of compute capability 9.0."""
    monkeypatch.setattr(command, "choose_place", lambda _: device.Place(
        "gpu", (9, 0), "Fake GPU", "a test", "fake", lambda x: x, np.asarray, None))


def test_a_shape_without_a_backward_still_has_its_forward_checked(tmp_path, monkeypatch):
    """The refusal of the backward once ended the check, though the forward runs."""
    _as_hopper(monkeypatch)

    def backward(*_, **__):
        raise UnsupportedError("no kernel serves it")
    monkeypatch.setattr(subject, "attention_backward", backward)
    status, record = _check(tmp_path, "--head-dim", "256")
    assert status == 0
    forward, refused, *_ = record["cases"][0]["runs"]
    assert forward["ok"] and len(forward["tensors"]) == 2 and "d256" in forward["fingerprint"]
    assert refused["refused"] == "no kernel serves it"
    assert "bwd_sm90_d256" in refused["fingerprint"]


@pytest.mark.parametrize("head_dim, schedule, words", [
    (128, "unordered", "this problem runs in the portable kernel; use 'auto', or one of"),
    (264, "auto", "allowed: multiples of 8 up to 256")])
def test_a_schedule_that_cannot_be_planned_is_an_error(monkeypatch, capsys, head_dim, schedule,
                                                       words):
    """Nothing of it had run, and that was called a failure of ours."""
    _as_hopper(monkeypatch)
    assert cli.main(["check", "--len", "9", "--scale", "1e-9", "--head-dim", str(head_dim),
                     "--schedule", schedule]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_the_widest_heads_are_checked_where_a_gpu_serves_them(monkeypatch):
    """Their kernels differ from those up to 128."""
    _as_hopper(monkeypatch)
    ran = []

    def run_case(_, case, names, *__):
        ran.append((case.problem.head_dim, list(names)))
        return run.CaseResult(case, (), "", 0, 0)

    monkeypatch.setattr(command, "run_case", run_case)
    assert cli.main(["check", "--bits", "repeats"]) == 0
    assert {head_dim for head_dim, names in ran if len(names) > 1} == {64, 96, 128, 192, 256}


def test_inputs_are_as_hard_as_they_say():
    """Normal inputs never show a padded score that overflows: lse must be below -88 for that."""
    problem = Problem(1, 40, 60, 2, 1, 64, "bfloat16", "full", 64 ** -0.5)
    made = {kind: inputs.make_inputs(kind, problem) for kind in inputs.INPUTS}
    normal = np.concatenate([array.astype(float).ravel() for array in made["normal"].values()])
    assert abs(normal).max() < 6 and abs(normal.mean()) < 0.02 and 1.1 < normal.std() < 1.2
    _, lse = attention_reference(*(made["deep"][name] for name in "qkv"))
    assert lse.max() < -100
    q, k = (made["one_hot"][name][0, :, 0].astype(float) for name in "qk")
    weights = np.exp(q @ k.T / 8)
    assert np.median(weights.max(axis=1) / weights.sum(axis=1)) > 0.95


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype, scale", [
    ("float16", "1e30"), ("float16", "1e-30"), ("float32", "5e37"), ("float64", "1e200"),
    ("float64", "1e307"), ("float64", "1e-200")])
def test_values_that_cannot_be_judged_are_refused(capsys, dtype, scale):
    """Bounds were infinite: every result was within them."""
    arguments = ["check", "--device", "cpu", "--len", "40", "--head-dim", "16", "--repeats", "1"]
    assert cli.main([*arguments, "--dtype", dtype, "--scale", scale]) == 2
    captured = capsys.readouterr()
    assert f"what {dtype} can hold" in captured.err and captured.err.count("\n") == 1
    assert "give a scale nearer to the default, 0.25" in captured.err


def test_inputs_have_the_same_bytes_on_every_machine():
    """Two machines compare digests of results, never the inputs: these must not depend on NumPy's
    distributions or a libm. The values were computed from the definition of Philox 4x64-10 in
    Python's integers.
    """
    problem = Problem(1, 3, 3, 1, 1, 4, "float32", "full", 0.5)
    q = inputs.make_inputs("normal", problem, seed=7)["q"].ravel()
    words = _philox(7, 0, 12)
    sums = [sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) for word in words]
    assert q.tolist() == [(total - 131070) / 32768 for total in sums]
    bfloat16 = inputs.make_inputs("normal", replace(problem, dtype="bfloat16"), seed=7)["q"].ravel()
    assert [float(x) for x in bfloat16] == [_round(x, 8) for x in q.tolist()]


def _philox(key0, key1, count):
    """Words of Philox 4x64 with 10 rounds; the counter starts at 1, as NumPy has it."""
    words = []
    for block in range(1, 1 + -(-count // 4)):
        x, key = [block, 0, 0, 0], [key0, key1]
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [b >> 64 ^ x[1] ^ key[0], b % 2**64, a >> 64 ^ x[3] ^ key[1], a % 2**64]
            key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
        words += x
    return words[:count]


def _round(x, digits):
    """``x`` with so many binary digits, to nearest even."""
    unit = 2.0 ** (math.frexp(x)[1] - digits)
    return round(x / unit) * unit


def test_the_longest_problems_go_without_reference(monkeypatch, tmp_path, capsys):
    """A float64 matrix of scores of a long problem would take all memory."""
    monkeypatch.setattr(truth, "MAX_HEAD_SCORES", 1000)
    status, record = _check(tmp_path, "--schedule", "auto")
    assert status == 0
    assert all(tensor["report"] is None for tensor in _tensors(record))
    assert "values not compared: too long for float64" in capsys.readouterr().out


def test_reference_takes_a_sample_of_many_heads(monkeypatch, tmp_path):
    monkeypatch.setattr(truth, "MAX_REFERENCE_SCORES", 2 * 2 * 70 * 90)
    status, record = _check(tmp_path, "--schedule", "auto")
    assert status == 0
    assert [(case["reference_heads"], case["heads"]) for case in record["cases"]] == [(2, 4)] * 4


@pytest.mark.parametrize("target", ["cpu", *config.SMEM_BYTES])
def test_default_cases_sit_around_the_tiles(target):
    found = cases.default_cases(target)
    problems = [case.problem for case in found]
    assert {case.inputs for case in found} == set(inputs.INPUTS)
    assert {problem.mask for problem in problems} == {"full", "causal", "causal_top_left"}
    assert any(p.q_per_kv > 1 and p.batch > 1 for p in problems)
    assert any(p.q_len > p.kv_len for p in problems) and any(p.q_len < p.kv_len for p in problems)
    tiles = config.choose_config(problems[0], "backward", target)
    assert problems[0].q_len % tiles.q_tile == 1 and problems[0].kv_len % tiles.kv_tile == 1
    quick = cases.default_cases(target, quick=True)
    assert {case.inputs for case in quick} == set(inputs.INPUTS) and len(quick) < len(found)
