"""The report for bug reports: complete where nothing is installed, and silent about nothing."""

import sys

from dashcupy import cache, driver, env, info, nvrtc
from dashcupy.errors import DashcupyError
from dashcupy.version import __version__


def test_report_without_a_gpu(tmp_path, monkeypatch):
    """It is asked for where things do not work: no driver and no NVRTC must not stop it."""
    monkeypatch.setattr(driver, "library", lambda: None)
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: ())
    nvrtc.default_library.cache_clear()
    driver.device.cache_clear()
    monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.cubin").write_bytes(bytes(3 << 20))
    before = set(sys.modules)
    try:
        found = info.collect()
    finally:
        nvrtc.default_library.cache_clear()
    assert not {"cupy", "torch", "jax"} & (set(sys.modules) - before)
    assert found["versions"]["dashcupy"] == __version__
    assert found["gpu"]["driver"] == "none" and "no NVIDIA driver" in found["gpu"]["GPU"]
    assert "dashcupy[cuda13]" in found["nvrtc"]["chosen"]
    assert found["cache"] == {"folder": str(tmp_path), "files": "1 (3.0 MiB)"}
    assert set(env.VARIABLES) <= set(found["environment"])
    assert found["environment"]["DASHCUPY_CACHE_DIR"] == str(tmp_path)


def test_gpus_and_compilers_are_listed(monkeypatch):
    old, new = (nvrtc.Library("/a/libnvrtc.so.12", (12, 9), (50, 121)),
                nvrtc.Library("/b/libnvrtc.so.13", (13, 0), (75, 121)))
    monkeypatch.setattr(driver, "version", lambda: (12, 4))
    monkeypatch.setattr(driver, "devices", lambda: (
        driver.Device(0, "NVIDIA H200", (9, 0), 132, 140 << 30, 232448),))
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: (old, new))
    monkeypatch.setattr(nvrtc, "default_library", lambda: nvrtc.choose_library((old, new), (12, 4)))
    found = info.collect()
    assert found["gpu"] == {
        "driver": "serves CUDA up to 12.4",
        "GPU 0": "NVIDIA H200, compute capability 9.0, 132 SMs, 140.0 GiB, "
                 "232448 bytes of shared memory for a CTA"}
    assert found["nvrtc"] == {
        "found 0": "NVRTC 12.9 (/a/libnvrtc.so.12), compute capability 5.0 to 12.1",
        "found 1": "NVRTC 13.0 (/b/libnvrtc.so.13), compute capability 7.5 to 12.1",
        "chosen": "NVRTC 12.9 (/a/libnvrtc.so.12)"}


def test_cache_folders_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(tmp_path / "none"))
    assert info.collect()["cache"]["files"] == "none (No such file or directory)"
    monkeypatch.setattr(cache, "folder_or_none", lambda: None)
    assert info.collect()["cache"] == {
        "folder": "none (no home folder; set DASHCUPY_CACHE_DIR)"}


def test_a_gpu_that_fails_is_reported(monkeypatch):
    def broken():
        raise DashcupyError("cuInit failed with error 999 (unknown error)")
    monkeypatch.setattr(driver, "version", lambda: (13, 0))
    monkeypatch.setattr(driver, "devices", broken)
    assert info.collect()["gpu"] == {
        "driver": "serves CUDA up to 13.0",
        "GPU": "none (cuInit failed with error 999 (unknown error))"}


def test_text_is_aligned():
    assert info.as_text({"one": {"a": "1", "long": "2"}, "two": {"b": "3"}}) == (
        "one:\n  a     1\n  long  2\ntwo:\n  b  3")
