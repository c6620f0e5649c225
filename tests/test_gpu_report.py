"""The record of the last GPU run: how it is written, and a warning when it is out of date."""

import json
import warnings
from types import SimpleNamespace

import gpu_report
import pytest

from dashcupy import driver, nvrtc


def report(nodeid, outcome, *keywords, when="call"):
    return SimpleNamespace(nodeid=nodeid, outcome=outcome, keywords=dict.fromkeys(keywords),
                           when=when)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(gpu_report, "_machine", lambda: {"device": "card"})


def test_counts(tmp_path, machine):
    """A test that fails in its tear-down has failed; CPU tests do not count."""
    plugin = gpu_report.GpuReport(tmp_path / "report.json", ["-m", "gpu"])
    for args in [("a", "passed", "gpu"), ("a", "passed", "gpu"), ("b", "passed", "sm90"),
                 ("b", "failed", "sm90"), ("c", "skipped", "gpu"), ("d", "failed", "slow")]:
        plugin.pytest_runtest_logreport(report(*args))
    plugin.pytest_sessionfinish()
    record = json.loads((tmp_path / "report.json").read_text())
    assert {key: record[key] for key in ("passed", "failed", "skipped", "device", "arguments")} == {
        "passed": 1, "failed": 1, "skipped": 1, "device": "card", "arguments": ["-m", "gpu"]}
    assert "1 GPU tests failed" in gpu_report.complaint(tmp_path / "report.json")


def test_a_test_that_ends_its_worker_has_failed(tmp_path, machine):
    """Its set-up had passed, so it counted as passed: a kernel that hangs left a green record."""
    plugin = gpu_report.GpuReport(tmp_path / "report.json", [])
    plugin.pytest_runtest_logreport(report("a", "passed", "gpu", when="setup"))
    plugin.pytest_runtest_logreport(report("a", "failed", when="???"))
    plugin.pytest_runtest_logreport(report("b", "failed", when="???"))
    plugin.pytest_sessionfinish()
    record = json.loads((tmp_path / "report.json").read_text())
    assert (record["passed"], record["failed"]) == (0, 2)


def test_no_record_without_a_gpu(tmp_path, machine):
    """A session that skipped everything must not overwrite the record of one that ran."""
    plugin = gpu_report.GpuReport(tmp_path / "report.json", [])
    plugin.pytest_runtest_logreport(report("a", "skipped", "gpu"))
    plugin.pytest_sessionfinish()
    assert not (tmp_path / "report.json").exists()
    assert "have not been run" in gpu_report.complaint(tmp_path / "report.json")


def test_code_that_has_changed_since(tmp_path, machine, monkeypatch):
    """A green record of other code proves nothing."""
    plugin = gpu_report.GpuReport(tmp_path / "report.json", [])
    plugin.pytest_runtest_logreport(report("a", "passed", "gpu"))
    plugin.pytest_sessionfinish()
    assert gpu_report.complaint(tmp_path / "report.json") == ""
    monkeypatch.setattr(gpu_report.source, "source_digest", lambda: "other")
    assert "made by other code" in gpu_report.complaint(tmp_path / "report.json")


def test_no_path_is_recorded(monkeypatch):
    """Where a compiler lies on somebody's machine is nobody's business, and says nothing."""
    device = SimpleNamespace(name="card", compute_capability=(9, 0))
    library = nvrtc.Library("/home/me/libnvrtc.so.13", (13, 0), (80, 90))
    monkeypatch.setattr(driver, "devices", lambda: (device,))
    monkeypatch.setattr(driver, "version", lambda: (13, 0))
    monkeypatch.setattr(driver, "require_cupy", lambda: SimpleNamespace(__version__="14"))
    monkeypatch.setattr(nvrtc, "default_library", lambda: library)
    assert gpu_report._machine() == {"device": "card", "compute_capability": "9.0",
                                     "driver": "CUDA 13.0", "cupy": "14", "nvrtc": "13.0"}
    assert "/" not in json.loads(gpu_report.PATH.read_text())["nvrtc"]


@pytest.mark.parametrize("expression, expected", [
    ("gpu", True), ("gpu and not slow", True), ("not slow", False), ("not gpu", False),
    ("", False)])
def test_sessions_that_write_a_record(expression, expected):
    """Only those that ask for the GPU tests."""
    config = SimpleNamespace(getoption=lambda name, default: expression)
    assert gpu_report.wanted(config) is expected


def test_the_record_on_disk_is_of_this_code():
    """Says so in the summary, and does not fail: a change is made before it is tested on a GPU."""
    if problem := gpu_report.complaint():
        warnings.warn(problem, stacklevel=1)
