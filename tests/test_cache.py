"""The cubin cache: damage, races, folders that cannot be written, and what its names depend on."""

import errno
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from dashcupy import cache, cubin, env, modules, nvrtc, source
from dashcupy.errors import DashcupyError

CUBIN = bytes(range(256)) * 8
KERNEL = """#include "step.cuh"
extern "C" __global__ void tiny(float* x) { x[threadIdx.x] += STEP * DC_SCALE; }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder (not made yet) of this test alone."""
    monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_private", None)
    return tmp_path / "cache"


@pytest.fixture
def kernel_root(tmp_path, monkeypatch):
    """A folder of CUDA sources with one small kernel."""
    if not nvrtc.find_libraries():
        pytest.skip("no NVRTC here: pip install 'dashcupy[test]'")
    root = tmp_path / "cuda_src"
    root.mkdir()
    (root / "tiny.cu").write_text(KERNEL)
    (root / "step.cuh").write_text("#define STEP 2.0f\n")
    monkeypatch.setattr(source, "cuda_root", lambda: root)
    return root


@pytest.fixture
def compilations(monkeypatch):
    """Architectures that NVRTC was really called for."""
    calls = []
    compile_cubin = nvrtc.compile_cubin

    def counted(text, arch, *args, **kwargs):
        calls.append(arch)
        return compile_cubin(text, arch, *args, **kwargs)

    monkeypatch.setattr(nvrtc, "compile_cubin", counted)
    return calls


def no_call():
    raise AssertionError("made again, although a sound copy was stored")


def test_a_stored_file_is_not_made_again(folder):
    path = cache.fetch("k-sm_80-0", lambda: CUBIN)
    assert path.parent == folder and path.read_bytes() == CUBIN
    assert cache.fetch("k-sm_80-0", no_call) == path
    assert cache.fetch("k-sm_80-1", lambda: b"other").read_bytes() == b"other"
    assert len(list(folder.iterdir())) == 2, "temporary files were left"


@pytest.mark.parametrize("damage", [
    b"", CUBIN[:1], CUBIN[:-1], CUBIN[:1000], CUBIN + b"\0", b"\xff" + CUBIN[1:],
    CUBIN[:-1] + b"\0"], ids=["empty", "one", "last", "half", "longer", "first-bit", "last-bit"])
def test_a_damaged_file_is_made_again(folder, damage):
    """A full disk or a power cut must not turn into an 'invalid image' on every later run."""
    path = cache.fetch("k", lambda: CUBIN)
    path.write_bytes(damage)
    assert cache.fetch("k", lambda: CUBIN).read_bytes() == CUBIN
    assert cache.fetch("k", no_call).read_bytes() == CUBIN


def test_a_half_written_file_of_another_process_is_not_read(folder):
    path = cache.fetch("k", lambda: CUBIN)
    path.rename(path.with_name(f".{path.name}.0123"))
    made = []
    cache.fetch("k", lambda: made.append(1) or CUBIN)
    assert made


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(DashcupyError, match="stored neither in .*No space left.*TMPDIR"), \
            pytest.warns(RuntimeWarning):
        cache.fetch("k", lambda: CUBIN)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("fault", ["a file is in the way", "disk full", "no home"])
def test_without_a_writable_folder_there_is_one_warning(folder, fault, tmp_path, monkeypatch):
    """Compute nodes with a read-only, missing or full home must work all the same."""
    if fault == "a file is in the way":  # also for root, whom permissions do not stop
        folder.write_text("")
        monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(folder / "below"))
        said = "directory"
    elif fault == "disk full":
        write_bytes = Path.write_bytes

        def full(path, content):
            if path.parent == folder:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_bytes(path, content)
        monkeypatch.setattr(Path, "write_bytes", full)
        said = "No space left"
    else:
        def homeless():
            raise RuntimeError("Could not determine home directory.")
        monkeypatch.setattr(env, "cache_dir", homeless)
        said = "no home folder"
    with pytest.warns(RuntimeWarning, match=f"{said}.*DASHCUPY_CACHE_DIR") as seen:
        path = cache.fetch("k", lambda: CUBIN)
    assert len(seen) == 1
    assert path.read_bytes() == CUBIN and tmp_path not in path.parents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.fetch("k", no_call) == path
        assert cache.fetch("other", lambda: b"x").parent == path.parent
    cache._remove_private(path.parent, os.getpid() + 1)
    assert path.exists(), "a forked child removed the files of its parent"
    cache._remove_private(path.parent, os.getpid())
    assert not path.parent.exists()


def test_a_filled_folder_that_cannot_be_written_is_used(folder, monkeypatch):
    """A container image may carry a read-only cache."""
    path = cache.fetch("k", lambda: CUBIN)
    monkeypatch.setattr(cache, "_write_at_once", no_call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.fetch("k", no_call) == path


def test_build_compiles_once(folder, kernel_root, compilations):
    path = modules.build("tiny", {"DC_SCALE": 3}, "sm_80")
    assert cubin.is_complete(path.read_bytes()) and path.name.startswith("tiny-sm_80-")
    assert modules.build("tiny", (("DC_SCALE", 3),), "sm_80") == path
    assert compilations == ["sm_80"]


def test_the_name_depends_on_all_that_makes_the_cubin(folder, kernel_root, compilations,
                                                      monkeypatch):
    """An edited header behind an old cubin costs a day of search."""
    def build(scale=3, arch="sm_80", library=None):
        return modules.build("tiny", {"DC_SCALE": scale}, arch, library).name

    names = [build(), build(scale=4), build(arch="sm_90a")]
    for library in nvrtc.find_libraries():
        if library != nvrtc.default_library():
            names.append(build(library=library))
    monkeypatch.setenv("DASHCUPY_LINEINFO", "1")
    names.append(build())
    monkeypatch.delenv("DASHCUPY_LINEINFO")
    (kernel_root / "step.cuh").write_text("#define STEP 5.0f\n")
    names.append(build())
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    names.append(build())
    assert len(set(names)) == len(names) == len(compilations)


def test_threads_share_one_compilation(folder, kernel_root, compilations):
    barrier, paths = threading.Barrier(8), []

    def work():
        barrier.wait()
        paths.append(modules.build("tiny", {"DC_SCALE": 3}, "sm_80"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8 and len(set(paths)) == 1 and len(compilations) == 1


def test_processes_do_not_disturb_each_other(folder, kernel_root):
    """Two ranks of one job start on an empty cache; each must see a whole file."""
    script = ("import sys, pathlib; from dashcupy import modules, source, cubin\n"
              f"source.cuda_root = lambda: pathlib.Path({str(kernel_root)!r})\n"
              "print('ready', flush=True); sys.stdin.readline()\n"
              "for scale in range(4):\n"
              "    path = modules.build('tiny', {'DC_SCALE': scale}, 'sm_80')\n"
              "    assert cubin.is_complete(path.read_bytes())\n"
              "    print(path, flush=True)\n")
    ranks = [subprocess.Popen([sys.executable, "-c", script], cwd=source.PACKAGE.parent,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
             for _ in range(2)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert outputs[0] == outputs[1] and len(set(outputs[0])) == 4
    assert sorted(map(str, folder.iterdir())) == sorted(outputs[0])


def test_the_source_is_kept_on_request(folder, kernel_root, monkeypatch):
    """Also when it does not compile: that is when one wants to see it."""
    monkeypatch.setenv("DASHCUPY_KEEP_SOURCE", "1")
    path = modules.build("tiny", {"DC_SCALE": 3}, "sm_80")
    kept = path.with_name(path.name.rsplit("-", 1)[0] + ".cu")
    assert kept.read_text() == source.expand("tiny", {"DC_SCALE": 3})
    with pytest.raises(nvrtc.CompileError):
        modules.build("tiny", {}, "sm_80")
    assert len(list(folder.glob("*.cu"))) == 2
