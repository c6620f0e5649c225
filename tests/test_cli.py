"""The command line: exit status, one-line errors, clean ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dashcupy import __version__, cli, cli_build, driver, info, nvrtc
from dashcupy.errors import DeviceError

ROOT = Path(__file__).resolve().parent.parent


def test_no_argument_prints_help(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for command in ("check", "info", "schedule", "build"):
        assert command in text


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"dashcupy {__version__}"


@pytest.mark.parametrize("argv, part", [
    (["schedule", "shit"], "did you mean 'shift'?"),
    (["schedule", "shift", "--mask", "causal"], "symmetric_shift"),
    (["check", "--device", "cpu", "--repeats", "0"], "--repeats 0: must be at least 1"),
    (["check", "--device", "cpu", "--len", "-3"], "--len -3: must be at least 1"),
    (["check", "--device", "cpu", "--heads", "3", "--kv-heads", "2"], "must be a multiple"),
    (["check", "--device", "cpu", "--len", "9", "--causal", "--schedule", "shift"],
     "symmetric_shift"),
    (["check", "--device", "cpu", "--len", "9", "--scale", "0"], "must be a finite number > 0"),
    (["check", "--device", "cpu", "--len", str(10**15)], "the arrays of this check take"),
    (["check", "--device", "cpu", "--bits", "repeats,lod"], "'lod' is not known (allowed: none"),
    # Nothing asked for would be nothing done, and status 0.
    (["check", "--device", "cpu", "--bits", ""], "'' is not known (allowed: none alone, or some"),
    (["check", "--device", "cpu", "--bits", "none,repeats"], "'none' is not known"),
    (["check", "--device", "cpu", "--schedule", ""], "schedule='' is not known"),
    (["check", "--device", "cpu", "--expect", ""], "--expect : cannot be read"),
    (["check", "--device", "cpu", "--json", ""], "--json : cannot be written"),
    (["schedule", "shift", "--plot", ""], "the suffix must be one of"),
    (["check", "--device", "cpu", "--repeats", "1", "--stress"], "give --repeats 2 or more"),
    (["check", "--device", "cpu", "--schedule", "unordered"], "on the Hopper backwards only "
     "(compute capability 9.0), and this problem is computed on the CPU; use 'auto', or one of"),
    (["check", "--device", "cpu", "--seed", "-1"], "must be from 0 to 2**64 - 1"),
    (["check", "--device", "cpu", "--layout", "bhsd"], "go with --function"),
    (["check", "--device", "cpu", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: cannot"),
    (["build", "--arch", "hopper"], "not an architecture"),
])
def test_an_error_is_one_line_and_status_2(capsys, argv, part):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert part in captured.err
    assert captured.out == ""


def test_gpu_is_refused_where_there_is_none(capsys, monkeypatch):
    def no_devices():
        raise DeviceError("no NVIDIA driver")
    monkeypatch.setattr(driver, "devices", no_devices)
    assert cli.main(["check", "--device", "gpu"]) == 2
    assert capsys.readouterr().err == "error: no NVIDIA driver\n"
    assert cli.main(["build"]) == 2
    error = capsys.readouterr().err
    assert "no GPU here to compile for: say for which with --arch" in error
    assert "needs no GPU (no NVIDIA driver)" in error


def test_info_prints_the_same_as_text_and_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == info.collect().keys()
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "versions:" in text and re.search(r"  transformers +(\d+\.|not installed)", text)


def test_ctrl_c_ends_without_a_traceback():
    """Ctrl-C in the middle of a long check once printed pages of NumPy frames."""
    # Shells start background jobs with SIGINT ignored, and the child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dashcupy", "check", "--device", "cpu", "--repeats", "10000"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    try:
        process.stdout.readline()  # the command has begun
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert errors == "interrupted\n"


def test_a_reader_that_stops_early_is_no_error():
    """``dashcupy info | head -1`` must not end in BrokenPipeError."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "dashcupy", "info"], cwd=ROOT, stdout=write,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not nvrtc.find_libraries(), reason="no NVRTC: pip install 'dashcupy[test]'")
def test_build_fills_the_cache_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(tmp_path))
    argv = ["build", "--arch", "sm_90a", "--head-dim", "64", "--dtype", "bfloat16", "--causal",
            "yes", "--schedule", "symmetric_shift"]
    assert cli.main(argv) == 0
    kernels = sorted(path.name.split("-")[0] for path in tmp_path.glob("*.cubin"))
    assert kernels == ["bwd_postprocess", "bwd_preprocess", "bwd_sm90_d64", "fwd_sm90"]
    text = capsys.readouterr().out
    assert "4 of 4 kernels are in the cache" in text
    assert "4 kernels for sm_90a (--arch sm_90a; compute capability 9.0) with NVRTC" in text
    assert "of: head_dim 64; bfloat16; mask causal; schedule symmetric_shift; arrays" in text


def test_build_tells_that_another_driver_may_want_another_compiler(built, capsys, monkeypatch):
    """Kernels are cached by their NVRTC; a machine without a GPU cannot know which it will be."""
    for version, told in ((None, True), ((13, 0), False)):
        monkeypatch.setattr(driver, "version", lambda version=version: version)
        assert cli.main(["build", "--arch", "sm_90a"]) == 0
        assert ("there is no driver here, so the newest NVRTC" in capsys.readouterr().out) == told


@pytest.fixture
def built(monkeypatch):
    """(kernel, defines) of what the command would compile."""
    kernels = []
    monkeypatch.setattr(cli_build.nvrtc, "default_library", lambda: None)
    monkeypatch.setattr(cli_build.nvrtc, "choose_arch", lambda *_: "sm_90a")
    monkeypatch.setattr(cli_build.modules, "build", lambda kernel, defines, arch: kernels.append(
        (kernel, dict(defines))))
    return kernels


def test_build_of_wide_heads(built, capsys):
    """Their backwards are kernels of their own, and no other GPU has one."""
    assert cli.main(["build", "--arch", "sm_90a", "--head-dim", "64", "192", "256"]) == 0
    wide = {kernel for kernel, defines in built if defines["DC_HEAD_DIM"] > 128}
    assert wide == {"fwd_sm90", "bwd_preprocess", "bwd_sm90_d192", "bwd_sm90_d256",
                    "bwd_postprocess"}
    assert cli.main(["build", "--arch", "sm_80", "--head-dim", "192"]) == 2
    assert "head_dim=192 is not supported" in capsys.readouterr().err


@pytest.mark.parametrize("argv, head_dims", [
    (["--arch", "sm_90a"], {32, 64, 96, 128, 192, 256}),
    (["--arch", "sm_90a", "--schedule", "auto"], {32, 64, 96, 128, 192, 256}),
    (["--arch", "sm_80"], {32, 64, 96, 128})])
def test_build_all_is_all_that_the_gpu_serves(built, argv, head_dims):
    assert cli.main(["build", "--all", *argv]) == 0
    assert {defines["DC_HEAD_DIM"] for _, defines in built} == head_dims


def test_build_obeys_debug_in_both_directions(built, monkeypatch):
    """Kernels of another config than the call's would be compiled again at the first call."""
    monkeypatch.setenv("DASHCUPY_DEBUG", "1")
    assert cli.main(["build", "--arch", "sm_90a", "--head-dim", "128"]) == 0
    found = {kernel: defines["DC_DEBUG"] for kernel, defines in built if "DC_DEBUG" in defines}
    assert found == {"fwd_sm90": 1, "bwd_sm90": 1, "bwd_postprocess": 1}
