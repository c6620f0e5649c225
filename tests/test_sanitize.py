"""The sanitizer script reads its children right: reports, failures, hangs, known false ones."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import sanitize, soak
from bench.sanitize import CASES, Outcome, cell, reports, run_tool

from dashcupy import source

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(CASES)[:4]
DIVERGENT = ["========= Barrier error detected. Divergent thread(s) in block.",
             "=========     at named_barrier_sync(int, int)+0x7500 in warpgroup.cuh:49",
             "=========     by thread (160,0,0) in block (5,0,0)",
             "=========         Device Frame: {}+0x7500 in wide.cuh:40", "========="]
# Stands for compute-sanitizer: done, two reports, a crash, a hang, in that order.
FAKE = f"""#!{sys.executable}
import sys, time
names = sys.argv[sys.argv.index("--child") + 1:]
print("========= COMPUTE-SANITIZER", flush=True)
for name in names:
    number = {NAMES}.index(name)
    if number == 1:
        print("========= Invalid __global__ read of size 2 bytes")
        print("=========     at fwd_sm80+0x10 in fwd_sm80.cu:7")
        print("=========     by thread (0,0,0)")
        print("=========")
        print("========= Invalid __global__ write of size 2 bytes")
        print("=========     at bwd_sm80+0x10")
    if number == 2:
        print("Segmentation fault", flush=True)
        sys.exit(1)
    if number == 3:
        time.sleep(60)
    print("case done:", name, flush=True)
"""


def test_children_that_report_crash_and_hang(tmp_path, monkeypatch):
    """A case behind one that crashed or hung is run all the same, and no fault passes for "ok"."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(sanitize, "LIMIT_S", 3)
    found = run_tool(str(fake), "memcheck", NAMES)
    assert [found[name].state for name in NAMES] == ["ok", "ok", "failed", "time limit"]
    assert [report[0][:30] for report in found[NAMES[1]].reports] == [
        "Invalid __global__ read of siz", "Invalid __global__ write of si"]
    assert found[NAMES[1]].reports[0][1] == "at fwd_sm80+0x10 in fwd_sm80.cu:7"
    assert found[NAMES[2]].reports == [["Segmentation fault"]]
    assert [cell("memcheck", found[name]) for name in NAMES] == [
        ("ok", False), ("2 NEW", True), ("failed", True), ("time limit", True)]


@pytest.mark.parametrize("tool, kernel, known", [
    ("synccheck", "bwd_sm90_d192", True), ("synccheck", "bwd_sm90_d64", False),
    ("racecheck", "bwd_sm90_d192", False)])
def test_only_what_is_known_is_passed_over(monkeypatch, tool, kernel, known):
    """A barrier that another kernel's warps miss must not hide there."""
    monkeypatch.setattr(sanitize, "KNOWN", (
        ("synccheck", r"(?s)Divergent.*named_barrier_sync.*bwd_sm90_d192", "because"),))
    found = reports([line.format(kernel) for line in DIVERGENT])
    assert len(found) == 1
    assert cell(tool, Outcome("ok", found)) == (("1 known", False) if known else ("1 NEW", True))


def test_the_table_has_a_place_for_every_tool(monkeypatch, capsys):
    """Hopper kernels under racecheck are left out and shown as such, not as "ok"."""
    names = ["d64 causal, team", "portable d64 causal"]
    outcome = Outcome("ok")
    status = sanitize.show({None: dict.fromkeys(names, outcome),
                            "racecheck": {names[1]: outcome}}, names)
    _, first, second = capsys.readouterr().out.splitlines()
    assert status == 0 and first.split()[-2:] == ["ok", "-"] and second.split()[-2:] == ["ok", "ok"]


def test_a_tool_that_does_not_start(monkeypatch, capsys):
    """Without the tool, or with one that cannot work here, nothing was checked."""
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2 and "compute-sanitizer is not here" in capsys.readouterr().out
    assert cell("racecheck", Outcome("not run")) == ("not run", True)


def test_every_kernel_has_a_case(monkeypatch):
    """A kernel that no case launches is not checked."""
    monkeypatch.setattr(sanitize.driver, "device", lambda index: sanitize.driver.Device(
        index, "", (9, 0), 132, 1, 1))
    launched = {kernel.kernel for case in CASES.values() for direction in ("forward", "backward")
                for kernel in sanitize._plan(case, direction).kernels}
    here = {path.stem for path in source.cuda_root().glob("*.cu")}
    assert launched == here - {"spin"}  # which reads and writes nothing


@pytest.mark.parametrize("shared, grown, wrong", [
    (False, "gpu", ["memory of the GPU grew by 1073741824 bytes (allowed: 4194304)"]),
    (True, "gpu", []),
    (True, "pool", ["memory of the pool grew by 1073741824 bytes (allowed: 0)"]),
    (True, "host", ["memory of the host grew by 1073741824 bytes (allowed: 16777216)"])])
def test_the_soak_blames_nobody_for_what_others_take(monkeypatch, shared, grown, wrong):
    """Beside other processes on the GPU it failed by their memory."""
    empty = soak.Memory(0, 0, 0)
    readings = iter([empty, empty, replace(empty, **{grown: 1 << 30})])
    kind = SimpleNamespace(call=tuple, expected=())
    monkeypatch.setattr(soak, "make_kind", lambda cupy, shape: kind)
    monkeypatch.setattr(soak, "comparer", lambda cupy: (
        lambda got, expected: None, SimpleNamespace(get=lambda: [0])))
    monkeypatch.setattr(soak, "read_memory", lambda cupy: next(readings))
    monkeypatch.setattr(soak, "run_out_of_memory", lambda cupy, kind: [])
    monkeypatch.setattr(soak, "faulthandler", MagicMock())
    assert soak.soak(MagicMock(), 20, 2, shared) == wrong


def test_the_soak_without_a_gpu_says_so():
    """It ended in a traceback of CuPy's."""
    done = subprocess.run([sys.executable, "-m", "bench.soak", "--calls", "1"], cwd=ROOT,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
                          text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: "), done.stderr
