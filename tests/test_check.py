"""The check command finds what it is there for: wrong values and changing bits."""

import itertools
import json

import numpy as np
import pytest

from dashcupy import check, check_cases, check_device, check_run, cli, config, driver, schedules
from dashcupy.errors import DashcupyError, DeviceError, UnsupportedError
from dashcupy.problem import Problem
from dashcupy.reference import attention_reference

SMALL = ["check", "--device", "cpu", "--batch", "2", "--len", "70", "--kv-len", "90", "--heads",
         "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float16", "--causal",
         "--repeats", "2"]


def _check(tmp_path, *more) -> tuple[int, dict]:
    file = tmp_path / "record.json"
    status = cli.main([*SMALL, *more, "--json", str(file)])
    return status, json.loads(file.read_text())


def _tensors(record):
    return [tensor for case in record["cases"] for run in case["runs"] for tensor in run["tensors"]]


def test_own_shape_passes_and_the_record_tells_all(tmp_path, capsys):
    status, record = _check(tmp_path)
    assert status == 0 and record["ok"] is True
    assert [case["case"]["inputs"] for case in record["cases"]] == ["normal", "deep", "one_hot"]
    assert record["cases"][0]["case"]["problem"] == {
        "batch": 2, "q_len": 70, "kv_len": 90, "n_q_head": 4, "n_kv_head": 2, "head_dim": 16,
        "dtype": "float16", "mask": "causal", "scale": 0.25}
    for case in record["cases"]:
        assert [run["name"] for run in case["runs"]] == [
            "forward", *(name for name in schedules.names() if schedules.supports(name, "causal"))]
        assert [tensor["name"] for tensor in case["runs"][0]["tensors"]] == ["out", "lse"]
        assert case["reference_heads"] == case["heads"] == 4
    for tensor in _tensors(record):
        assert 0 <= tensor["report"]["max_error"] <= tensor["report"]["max_bound"]
        assert len(tensor["digest"]) == 64 and tensor["same"] and tensor["alone"]
    assert record["device"]["kind"] == "cpu" and record["info"]["versions"]["numpy"]
    text = capsys.readouterr().out
    assert "--device cpu was given" in text and "all 15 checks hold" in text
    assert "\033" not in text and max(map(len, text.splitlines())) <= 100


def test_json_to_stdout_is_nothing_but_json(capsys):
    assert cli.main([*SMALL, "--schedule", "auto", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in record["cases"][0]["runs"]] == ["forward", "auto"]


def _spoil(monkeypatch, change):
    """Pass the gradients of every call through ``change(number of the call, dq, dk, dv)``."""
    real, calls = check_run.attention_backward, itertools.count()
    monkeypatch.setattr(check_run, "attention_backward",
                        lambda *args, **options: change(next(calls), *real(*args, **options)))


def test_one_changed_bit_in_a_repeat_is_found(tmp_path, monkeypatch, capsys):
    def change(call, dq, dk, dv):
        if call == 1:
            dk.view(np.uint16)[1, 5, 1, 3] ^= 1
        return dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1 and record["ok"] is False
    bad = [tensor["name"] for tensor in _tensors(record) if not tensor["same"]]
    assert bad == ["dk"]
    assert "dk: the bits changed from one run to the next" in capsys.readouterr().out


def test_bits_that_depend_on_the_batch_are_found(tmp_path, monkeypatch, capsys):
    def change(call, dq, dk, dv):
        if dq.shape[0] == 1:
            dq = np.nextafter(dq, np.float16(np.inf))
        return dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1
    assert {t["name"] for t in _tensors(record) if t["alone"] is False} == {"dq"}
    assert all(tensor["same"] for tensor in _tensors(record))
    assert "computed alone has other bits" in capsys.readouterr().out


@pytest.mark.parametrize("wrong, report", [(np.nan, "nan"), (9.0, None)])
def test_a_wrong_value_is_found_and_a_nan_keeps_the_record_valid(tmp_path, monkeypatch, capsys,
                                                                 wrong, report):
    def change(call, dq, dk, dv):
        dv[-1, 40, -1, 2] = wrong
        return dq, dk, dv
    _spoil(monkeypatch, change)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 1
    bad = [tensor for tensor in _tensors(record) if not tensor["ok"]]
    assert {tensor["name"] for tensor in bad} == {"dv"} and all(t["same"] for t in bad)
    if report:
        assert bad[0]["report"]["max_error"] == report
    assert "FAIL ascending" in capsys.readouterr().out


def test_a_schedule_that_the_device_refuses_is_told_and_no_failure(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise UnsupportedError("needs 64 CTAs resident together")
    monkeypatch.setattr(check_run, "attention_backward", refuse)
    status, record = _check(tmp_path, "--schedule", "ascending")
    assert status == 0
    assert record["cases"][0]["runs"][1]["refused"] == "needs 64 CTAs resident together"
    assert "refused ascending: needs 64 CTAs" in capsys.readouterr().out


def _as_hopper(monkeypatch):
    """Let the check believe that it computes on a GPU of compute capability 9.0."""
    monkeypatch.setattr(check, "choose_place", lambda device: check_device.Place(
        "gpu", (9, 0), "Fake GPU", "a test", lambda x: x, np.asarray))


def test_the_widest_heads_are_checked_where_a_gpu_serves_them(monkeypatch):
    """Their kernels differ from those up to 128."""
    _as_hopper(monkeypatch)
    ran = []

    def run_case(case, names, *_):
        ran.append((case.problem.head_dim, list(names)))
        return check_run.CaseResult(case, (), 0, 0)

    monkeypatch.setattr(check, "run_case", run_case)
    assert cli.main(["check"]) == 0
    assert {head_dim for head_dim, names in ran if len(names) > 1} == {64, 96, 128, 192, 256}


def test_inputs_are_as_hard_as_they_say():
    """Normal inputs never show a padded score that overflows: lse must be below -88 for that."""
    problem = Problem(1, 40, 60, 2, 1, 64, "bfloat16", "full", 64 ** -0.5)
    inputs = {case.inputs: check_cases.make_inputs(case) for case in check_cases.own_cases(problem)}
    assert max(abs(array.astype(float)).max() for array in inputs["normal"].values()) < 6
    _, lse = attention_reference(*(inputs["deep"][name] for name in "qkv"))
    assert lse.max() < -100
    q, k = (inputs["one_hot"][name][0, :, 0].astype(float) for name in "qk")
    weights = np.exp(q @ k.T / 8)
    assert np.median(weights.max(axis=1) / weights.sum(axis=1)) > 0.95


def test_the_longest_problems_go_without_reference(monkeypatch, tmp_path, capsys):
    """A float64 matrix of scores of a long problem would take all memory."""
    monkeypatch.setattr(check_run, "MAX_HEAD_SCORES", 1000)
    status, record = _check(tmp_path, "--schedule", "auto")
    assert status == 0
    assert all(tensor["report"] is None for tensor in _tensors(record))
    assert "too long for float64" in capsys.readouterr().out


def test_reference_takes_a_sample_of_many_heads(monkeypatch, tmp_path):
    monkeypatch.setattr(check_run, "MAX_REFERENCE_SCORES", 2 * 2 * 70 * 90)
    status, record = _check(tmp_path, "--schedule", "auto")
    assert status == 0
    assert [(case["reference_heads"], case["heads"]) for case in record["cases"]] == [(2, 4)] * 3


@pytest.mark.parametrize("target", ["cpu", *config.SMEM_BYTES])
def test_default_cases_sit_around_the_tiles(target):
    cases = check_cases.default_cases(target)
    problems = [case.problem for case in cases]
    assert {case.inputs for case in cases} == set(check_cases.INPUTS)
    assert {problem.mask for problem in problems} == {"full", "causal", "causal_top_left"}
    assert any(p.q_per_kv > 1 and p.batch > 1 for p in problems)
    assert any(p.q_len > p.kv_len for p in problems) and any(p.q_len < p.kv_len for p in problems)
    tiles = config.choose_config(problems[0], "backward", target)
    assert problems[0].q_len % tiles.q_tile == 1 and problems[0].kv_len % tiles.kv_tile == 1
    quick = check_cases.default_cases(target, quick=True)
    assert {case.inputs for case in quick} == set(check_cases.INPUTS) and len(quick) < len(cases)


@pytest.mark.parametrize("devices, why", [
    ([], "the driver sees no GPU"),
    ([(7, 5)], "Old GPU has compute capability 7.5; the kernels need 8.0"),
    (None, "no NVIDIA driver"),
])
def test_without_a_usable_gpu_the_cpu_is_taken_and_the_reason_told(monkeypatch, devices, why):
    def found():
        if devices is None:
            raise DeviceError("no NVIDIA driver")
        return tuple(driver.Device(0, "Old GPU", capability, 40, 1 << 30, 64 << 10)
                     for capability in devices)
    monkeypatch.setattr(driver, "devices", found)
    monkeypatch.setattr(driver, "require_cupy", lambda: None)
    place = check_device.choose_place("auto")
    assert (place.kind, place.target) == ("cpu", "cpu") and why in place.why
    with pytest.raises(DashcupyError, match=why):
        check_device.choose_place("gpu")
