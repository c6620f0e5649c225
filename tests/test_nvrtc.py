"""NVRTC: where errors point, what compiles, which library and architecture are chosen."""

import re
import sys
from pathlib import Path

import pytest

from dashcupy import driver, nvrtc, source
from dashcupy.cubin import is_complete
from dashcupy.errors import CompileError, UnsupportedError
from dashcupy.nvrtc import Library

TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] += 1.0f; }\n'
# An instruction of its own for every generation that the kernels aim at.
MMA = """
extern "C" __global__ void tensor(float* x, const unsigned* a) {
  float d[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]));
#if __CUDA_ARCH__ == 900
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
  x[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
OLD = Library("old", (12, 4), (50, 75, 80, 86, 87, 89, 90))
NEW_12 = Library("new 12", (12, 9), (*OLD.archs, 100, 101, 103, 120, 121))
NEW_13 = Library("new 13", (13, 0), (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))

needs_nvrtc = pytest.mark.skipif(not nvrtc.find_libraries(),
                                 reason="no NVRTC here: pip install 'dashcupy[test]'")


def installed(major):
    """The newest NVRTC of a CUDA major version on this machine."""
    found = [lib for lib in nvrtc.find_libraries() if lib.version[0] == major]
    if not found:
        pytest.skip(f"no NVRTC {major} here: pip install the NVRTC wheel of CUDA {major}")
    return max(found, key=lambda lib: lib.version)


@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_target_compiles(major, arch):
    """With no GPU, no toolkit and no header; the cubin must not lack its last byte."""
    compiled = nvrtc.compile_cubin(MMA, arch, library=installed(major))
    assert is_complete(compiled.cubin) and not is_complete(compiled.cubin[:-1])
    assert compiled.log == ""


@pytest.mark.parametrize("major", [12, 13])
def test_errors_name_the_real_file_and_line(tmp_path, major):
    """Errors in the kernel, in a header, after an include, and in a define's use."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "k.cu").write_text(
        '#include "sub/a.cuh"\n#include "sub/b.cuh"\n\ntypedef first k;\n'
        'static_assert(DC_Q_TILE == 64, "rows");\n')
    (tmp_path / "sub/a.cuh").write_text("#pragma once\n/* two\nlines */\ntypedef second a;\n")
    (tmp_path / "sub/b.cuh").write_text('#pragma once\n#include "sub/a.cuh"\ntypedef third b;\n')
    text = source.expand("k", {"DC_Q_TILE": 48, "DC_SCHEDULE": "sub/a.cuh"}, tmp_path)
    with pytest.raises(CompileError) as error:
        nvrtc.compile_cubin(text, "sm_80", ("--fmad=false",), library=installed(major))
    message = str(error.value)
    found = re.findall(r"^  (\S+)\((\d+)\): error: (.*)$", message, re.MULTILINE)
    assert [(name, int(line)) for name, line, _ in found] == [
        ("sub/a.cuh", 4), ("sub/b.cuh", 3), ("k.cu", 4), ("k.cu", 5)]
    assert '"second"' in found[0][2] and '"third"' in found[1][2] and '"first"' in found[2][2]
    assert "for sm_80 (options: --fmad=false)" in message
    assert "#define DC_Q_TILE 48" in message and '#define DC_SCHEDULE "sub/a.cuh"' in message
    assert "python -m dashcupy info" in message


@needs_nvrtc
def test_a_wrong_option_is_an_error_with_its_name():
    with pytest.raises(CompileError, match="no-such-option(.|\n)*or of the options"):
        nvrtc.compile_cubin(TINY, "sm_80", ("--no-such-option",))


@needs_nvrtc
def test_a_long_log_is_cut():
    with pytest.raises(CompileError, match=r"and \d+ more lines"):
        nvrtc.compile_cubin("int a = b;\n" * 40, "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_30", "sm_999", "sm_"])
def test_unknown_target_names_the_range(arch):
    library = nvrtc.default_library()
    with pytest.raises(CompileError, match=f"{arch}, only for .* {library.arch_range}; install"):
        nvrtc.compile_cubin(TINY, arch)


@pytest.mark.parametrize("driver_version, expected", [
    (None, NEW_13), ((13, 2), NEW_13), ((13, 0), NEW_13), ((14, 0), NEW_13),
    ((12, 9), NEW_12), ((12, 2), NEW_12),
])
def test_newest_library_that_the_driver_can_follow(driver_version, expected):
    """With the wheels of two CUDA versions side by side, the newer one makes cubins that an
    older driver refuses; found at the first launch only."""
    assert nvrtc.choose_library([OLD, NEW_13, NEW_12], driver_version) is expected


@pytest.mark.parametrize("libraries, driver_version, says", [
    ([NEW_13], (12, 8), r"new 13\).*not newer than CUDA 12.*dashcupy\[cuda12\]"),
    ([], (13, 0), r"found: none.*dashcupy\[cuda13\]"),
    ([Library("ancient", (11, 8), (80, 90))], None, r"ancient.*needed: 12.0 or newer"),
    ([NEW_12], (11, 4), "install a newer driver"),
])
def test_no_usable_library_says_what_was_found_and_what_to_install(libraries, driver_version, says):
    with pytest.raises(CompileError, match=says):
        nvrtc.choose_library(libraries, driver_version)


@pytest.mark.parametrize("driver_version, major", [((12, 4), 12), ((13, 0), 13), (None, 13)])
def test_choice_among_the_wheels_that_are_installed(monkeypatch, driver_version, major):
    for wheel in (12, 13):
        installed(wheel)
    monkeypatch.setattr(driver, "version", lambda: driver_version)
    nvrtc.default_library.cache_clear()
    try:
        assert nvrtc.default_library().version[0] == major
    finally:
        nvrtc.default_library.cache_clear()


@pytest.mark.parametrize("capability, library, arch", [
    ((8, 0), OLD, "sm_80"), ((8, 6), OLD, "sm_86"), ((8, 9), OLD, "sm_89"),
    ((8, 8), OLD, "sm_87"), ((8, 8), NEW_13, "sm_88"),
    ((9, 0), OLD, "sm_90a"), ((9, 0), NEW_13, "sm_90a"),
    ((10, 0), NEW_12, "sm_100"), ((10, 3), NEW_12, "sm_103"), ((10, 9), NEW_13, "sm_103"),
    ((11, 0), NEW_13, "sm_110"), ((12, 0), NEW_12, "sm_120"), ((12, 1), NEW_13, "sm_121"),
    ((12, 4), NEW_13, "sm_121"),
])
def test_architecture_for_each_gpu(capability, library, arch):
    assert nvrtc.choose_arch(capability, library) == arch


@pytest.mark.parametrize("capability, library", [
    ((10, 0), OLD), ((12, 0), OLD), ((13, 0), NEW_13), ((11, 0), NEW_12)])
def test_gpu_newer_than_the_compiler(capability, library):
    """Not an 'invalid arch' from deep inside: GPU, compiler and its range are named."""
    with pytest.raises(CompileError) as error:
        nvrtc.choose_arch(capability, library)
    for part in ("{}.{}".format(*capability), str(library), library.arch_range, "pip install"):
        assert part in str(error.value)


def test_gpu_that_is_too_old():
    with pytest.raises(UnsupportedError, match=r"7\.5 is not supported.*8\.0"):
        nvrtc.choose_arch((7, 5), NEW_12)


def test_search_survives_files_that_are_no_library(tmp_path, monkeypatch):
    """A broken toolkit on the way must not hide the sound one behind it."""
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnvrtc.so.12").write_text("not a library")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert str(tmp_path / "lib64/libnvrtc.so.12") in list(nvrtc._candidates())
    found = list(nvrtc._loadable(nvrtc._candidates()))
    assert found == list(nvrtc.find_libraries())
    assert len({lib.handle._handle for lib in found}) == len(found), "one library, listed twice"


@needs_nvrtc
@pytest.mark.skipif(sys.platform != "linux", reason="names of shared libraries")
def test_toolkit_folder_is_searched_behind_its_links(tmp_path, monkeypatch):
    """Opened by the name of a link, NVRTC does not find its built-in functions."""
    real = Path(nvrtc.default_library().path)
    if not real.is_file():
        pytest.skip("found by the dynamic linker: its folder is not known")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnvrtc.so").symlink_to(real)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    first = next(nvrtc._candidates())
    assert Path(first) == real.resolve()
    library = next(nvrtc._loadable(iter([first])))
    assert library.version == nvrtc.default_library().version


def test_a_broken_nvrtc_is_not_called_a_broken_kernel():
    class Broken:
        """Fails as one does that misses its built-in functions."""
        def __getattr__(self, name):
            return lambda *arguments: 7 if name == "nvrtcCompileProgram" else 0

        nvrtcGetProgramLogSize = staticmethod(
            lambda program, size: setattr(size._obj, "value", 20) or 0)
        nvrtcGetProgramLog = staticmethod(
            lambda program, buffer: setattr(buffer, "value", b"failed to open x") or 0)

    library = Library("/x/libnvrtc.so.12", (12, 9), (80,), Broken())
    with pytest.raises(CompileError, match="failed to open x(.|\n)*fault of that NVRTC.*install"):
        nvrtc.compile_cubin(TINY, "sm_80", library=library)
