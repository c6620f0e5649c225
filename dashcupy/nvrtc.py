"""NVRTC through ctypes: which libraries there are, which one to take, source to cubin."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import driver
from .cubin import is_complete
from .errors import CompileError, UnsupportedError

MIN_VERSION = (12, 0)  # the first that knows sm_90a
MIN_CAPABILITY = (8, 0)
_MAX_LOG_LINES = 60
_COMPILATION_ERROR = 6  # nvrtcResult: the source is at fault, not the compiler or the options


@dataclass(frozen=True)
class Library:
    """One NVRTC.

    Parameters
    ----------
    path
        Where it was found; a bare file name when the dynamic linker found it.
    version
        CUDA version (major, minor).
    archs
        Architectures it compiles for, ascending: 80, 86, 90, ...
    handle
        The loaded library.
    """

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    handle: ctypes.CDLL | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"NVRTC {_dotted(self.version)} ({self.path})"

    @property
    def arch_range(self) -> str:
        """First and last compute capability that it compiles for."""
        return f"{_dotted(divmod(self.archs[0], 10))} to {_dotted(divmod(self.archs[-1], 10))}"


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin, and what the compiler said while it made it (empty when all is well)."""

    cubin: bytes
    log: str


def compile_cubin(source: str, arch: str, options: Sequence[str] = (), *,
                  library: Library | None = None) -> CompiledKernel:
    """Compile one translation unit.

    Parameters
    ----------
    source
        Text without includes, as `dashcupy.source.expand` writes it.
    arch
        ``"sm_80"``, ``"sm_90a"``, ...
    options
        Further NVRTC options; ``-arch`` and ``-std=c++17`` are given already.
    library
        The NVRTC to use; by default the newest that the driver allows.

    Raises
    ------
    CompileError
        NVRTC refuses the source or the options, or cannot compile for ``arch``.
    """
    library = library or default_library()
    if int(re.sub(r"\D", "", arch) or 0) not in library.archs:
        raise CompileError(f"{library} cannot compile for {arch}, only for compute capability "
                           f"{library.arch_range}; {_install_hint()}")
    flags = [flag.encode() for flag in (f"-arch={arch}", "-std=c++17", *options)]
    nvrtc, program = library.handle, ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu",
                                           0, None, None))
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags),
                                         (ctypes.c_char_p * len(flags))(*flags))
        log = _bytes_of(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if code != 0:
            raise CompileError(_refusal(library, source, arch, options, code,
                                        log or _error(nvrtc, code)))
        cubin = _bytes_of(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if not is_complete(cubin):
        raise CompileError(f"{library} returned {len(cubin)} bytes that are not a whole cubin "
                           f"for {arch}; install NVRTC again")
    return CompiledKernel(cubin, log)


def choose_arch(compute_capability: tuple[int, int], library: Library) -> str:
    """Architecture to compile for on one GPU.

    The GPU's own if NVRTC knows it, else the nearest older one of the same major version, whose
    code runs on it too. 9.0 gives ``"sm_90a"``, since wgmma exists there only.

    Raises
    ------
    UnsupportedError
        The GPU is older than compute capability 8.0.
    CompileError
        NVRTC knows no architecture whose code runs on the GPU.
    """
    gpu = f"a GPU of compute capability {_dotted(compute_capability)}"
    if compute_capability < MIN_CAPABILITY:
        raise UnsupportedError(f"{gpu} is not supported: the kernels need {_dotted(MIN_CAPABILITY)}"
                               f" (Ampere) or newer; NumPy arrays are computed on the CPU")
    major, minor = compute_capability
    known = [arch for arch in library.archs if 10 * major <= arch <= 10 * major + minor]
    if not known:
        raise CompileError(f"{library} cannot compile for {gpu}, only for {library.arch_range}; "
                           f"{_install_hint()}")
    return "sm_90a" if known[-1] == 90 and minor == 0 else f"sm_{known[-1]}"


@functools.cache
def default_library() -> Library:
    """The NVRTC that this process uses; see `choose_library`."""
    return choose_library(find_libraries(), driver.version())


def choose_library(libraries: Sequence[Library],
                   driver_version: tuple[int, int] | None) -> Library:
    """The newest NVRTC whose cubins the driver can load.

    A driver loads cubins of its own CUDA major version (whatever the minor) and of older ones.
    Without a driver nothing can be loaded, and the newest compiler is taken.

    Raises
    ------
    CompileError
        No library fits.
    """
    fitting = [library for library in libraries if library.version >= MIN_VERSION
               and (driver_version is None or library.version[0] <= driver_version[0])]
    if not fitting:
        found = ", ".join(map(str, libraries)) or "none"
        needed = f"{_dotted(MIN_VERSION)} or newer"
        if driver_version:
            needed += f", and not newer than CUDA {driver_version[0]}, which the driver serves"
        raise CompileError(f"no usable NVRTC (found: {found}; needed: {needed}); "
                           f"{_install_hint(driver_version)}")
    return max(fitting, key=lambda library: library.version)


@functools.cache
def find_libraries() -> tuple[Library, ...]:
    """Every NVRTC that can be loaded, in the order of search."""
    found = list(_loadable(_candidates()))
    if not found:  # pathfinder knows more places, but loads into the global namespace
        found = list(_loadable(_pathfinder_candidates()))
    return tuple(found)


def _candidates() -> Iterator[str]:
    """Files that may be an NVRTC: wheels, toolkits, conda, then the dynamic linker's."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [folder for place in (wheels and wheels.submodule_search_locations or ())
               for folder in sorted(Path(place).glob("*/lib"), reverse=True)]
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda",
                os.environ.get("CONDA_PREFIX"), sys.prefix]
    folders += [Path(toolkit) / sub for toolkit in toolkits if toolkit for sub in ("lib64", "lib")]
    seen = set()
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so*")):
            if (real := path.resolve()) not in seen:
                seen.add(real)
                yield str(real)  # the library looks for its other half beside this name
    # Also finds a copy that another package has loaded already.
    yield from (f"libnvrtc.so.{major}" for major in range(MIN_VERSION[0], MIN_VERSION[0] + 6))
    yield "libnvrtc.so"


def _pathfinder_candidates() -> Iterator[str]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
        yield load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, OSError, RuntimeError):  # its "not found" is a RuntimeError
        return


def _loadable(paths: Iterator[str]) -> Iterator[Library]:
    handles = set()
    for path in paths:
        try:
            nvrtc = ctypes.CDLL(path)
            major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
            _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
            archs = (ctypes.c_int * count.value)()
            _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(archs))
        except (OSError, AttributeError, CompileError):
            continue  # not a library for this machine, or an NVRTC too old to say what it can do
        if nvrtc._handle not in handles:  # the same file under another name
            handles.add(nvrtc._handle)
            yield Library(path, (major.value, minor.value), tuple(sorted(archs)), nvrtc)


def _bytes_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise CompileError(_error(nvrtc, code))


def _error(nvrtc: ctypes.CDLL, code: int) -> str:
    return f"NVRTC error {code}: {nvrtc.nvrtcGetErrorString(code).decode()}"


def _refusal(library: Library, source: str, arch: str, options: Sequence[str], code: int,
             log: str) -> str:
    lines = log.splitlines()
    if len(lines) > _MAX_LOG_LINES:
        lines[_MAX_LOG_LINES:] = [f"... and {len(lines) - _MAX_LOG_LINES} more lines"]
    config = re.findall(r"^#define DC_.*$", source.split("\n#line", 1)[0], re.MULTILINE)
    if code == _COMPILATION_ERROR:
        advice = ("This is a fault in the kernel or its config, not in your arrays: please report "
                  "it with the output of `python -m dashcupy info`. DASHCUPY_KEEP_SOURCE=1 keeps "
                  "the whole source in the cache folder.")
    else:
        advice = f"This is a fault of that NVRTC or of the options: {_install_hint()}."
    return "\n".join([
        f"{library} refuses a kernel for {arch} (options: {' '.join(options) or 'none'})",
        *(f"  {line}" for line in lines),
        "its config block:", *(f"  {line}" for line in config or ["(none)"]),
        advice])


def _install_hint(driver_version: tuple[int, int] | None = None) -> str:
    major = min((driver_version or driver.version() or (13, 0))[0], 13)
    if major < 12:
        return "the driver is older than CUDA 12: install a newer driver"
    return (f'install a fitting one with pip install "dashcupy[cuda{major}]"'
            f"{'' if major >= 13 else ', or a newer driver'}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
