"""From a kernel's name and config to a cubin on disk, and to a function on a GPU."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import cache, driver, env, nvrtc, source
from .cubin import Resources, resources
from .errors import DeviceError

# A kernel may have this much shared memory without asking for it.
_SMEM_LIMIT_BYTES = 48 * 1024

Defines = Mapping[str, "int | str"] | tuple[tuple[str, "int | str"], ...]

_loaded: dict[tuple, Kernel] = {}
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_locks_guard = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """One kernel on one GPU, ready to launch.

    Parameters
    ----------
    name, arch, device_id
        What it is, what it was compiled for, where it lives.
    function
        CUfunction handle.
    raw
        The same as a CuPy RawKernel; keeps the module loaded.
    resources
        Registers, stack and shared memory.
    path
        The cubin.
    """

    name: str
    arch: str
    device_id: int
    function: int
    raw: object = field(repr=False)
    resources: Resources
    path: Path


def build(kernel: str, defines: Defines, arch: str, library: nvrtc.Library | None = None) -> Path:
    """Compile a kernel, unless a sound cubin of it is on disk.

    Parameters
    ----------
    kernel
        Stem of a ``.cu`` in ``cuda_src``.
    defines
        Config block: a mapping, or a tuple of (name, value) pairs.
    arch
        ``"sm_80"``, ``"sm_90a"``, ...
    library
        The NVRTC to use; by default the newest that the driver allows.

    Returns
    -------
    pathlib.Path
        The cubin. Safe to call from several threads and processes at a time.

    Raises
    ------
    CompileError
        The source cannot be expanded or compiled.
    """
    library = library or nvrtc.default_library()
    options = ("-lineinfo",) if env.lineinfo() else ()
    text = source.expand(kernel, dict(defines))
    name = cache.name_of(kernel, arch, library.version, options, text)
    with _lock_of(name):
        if env.keep_source():
            cache.keep_source(name, text)
        return cache.fetch(
            name, lambda: nvrtc.compile_cubin(text, arch, options, library=library).cubin)


def load(kernel: str, defines: Defines, device_id: int, *, smem_bytes: int = 0) -> Kernel:
    """Build a kernel for one GPU and load it, once per process.

    Parameters
    ----------
    kernel, defines
        As for `build`. On a hot path give ``defines`` as the same tuple of pairs each time: then
        a kernel that is loaded already is found without building a key.
    device_id
        Number of the GPU.
    smem_bytes
        Dynamic shared memory of a launch; the function is allowed that much.

    Raises
    ------
    CompileError
        The kernel cannot be compiled for this GPU.
    DeviceError
        No CuPy, driver or GPU, more shared memory than the GPU has, or the driver refuses the
        module.
    """
    if type(defines) is not tuple:
        defines = tuple(sorted(defines.items()))
    key = (kernel, device_id, smem_bytes, defines)
    found = _loaded.get(key)
    if found is None:
        with _lock_of(repr(key)):
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = _load(kernel, defines, device_id, smem_bytes)
    return found


def _load(kernel: str, defines: Defines, device_id: int, smem_bytes: int) -> Kernel:
    cupy = driver.require_cupy()
    gpu = driver.device(device_id)
    arch = nvrtc.choose_arch(gpu.compute_capability, nvrtc.default_library())
    path = build(kernel, defines, arch)
    try:
        taken = resources(path.read_bytes())[kernel]
    except OSError as error:
        raise DeviceError(f"the compiled {kernel} cannot be read back ({error}): something empties "
                          f"the cache; call again, or set DASHCUPY_CACHE_DIR") from error
    total = smem_bytes + taken.static_smem_bytes
    if total > gpu.smem_bytes:
        raise DeviceError(f"{kernel} needs {total} bytes of shared memory and {gpu.name} gives a "
                          f"CTA {gpu.smem_bytes}: choose smaller tiles or fewer stages")

    def load_function():
        raw = cupy.RawModule(path=str(path)).get_function(kernel)
        function = raw.kernel.ptr
        if total > _SMEM_LIMIT_BYTES:
            raw.max_dynamic_shared_size_bytes = smem_bytes
        return function, raw

    try:
        function, raw = driver.on_device(device_id, load_function)
    except RuntimeError as error:  # CuPy's driver and runtime errors
        raise DeviceError(
            f"{gpu.name} refuses {kernel} ({path}, {arch}, {nvrtc.default_library()}): "
            f"{error}; `python -m dashcupy info` shows driver and compiler") from error
    return Kernel(kernel, arch, device_id, function, raw, taken, path)


def _lock_of(name: str) -> threading.Lock:
    with _locks_guard:
        return _locks[name]
