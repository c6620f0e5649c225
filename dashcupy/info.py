"""What a bug report needs: versions, GPUs, compilers, the cache and the environment."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from . import cache, driver, env, nvrtc
from .errors import DashcupyError
from .version import __version__

_PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cupy",
             "cuda-pathfinder", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "torch", "jax",
             "transformers")
_FOREIGN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUPY_CACHE_DIR")


def collect() -> dict[str, dict[str, str]]:
    """Sections of (name, value) texts; imports no other package and never raises for a lack.

    Returns
    -------
    dict
        ``"versions"``, ``"system"``, ``"gpu"``, ``"nvrtc"``, ``"cache"``, ``"environment"``.
    """
    return {
        "versions": {"dashcupy": __version__, "python": platform.python_version(),
                     **{name: _installed(name) for name in _PACKAGES}},
        "system": {"platform": platform.platform(), "machine": platform.machine()},
        "gpu": _gpus(),
        "nvrtc": _compilers(),
        "cache": _cache(),
        "environment": {
            **{name: os.environ.get(name, f"not set ({default})")
               for name, (default, _) in env.VARIABLES.items()},
            **{name: os.environ.get(name, "not set") for name in _FOREIGN_VARIABLES}},
    }


def as_text(sections: dict[str, dict[str, str]]) -> str:
    """The sections of `collect` as aligned lines."""
    lines = []
    for title, rows in sections.items():
        width = max(map(len, rows), default=0)
        lines += [f"{title}:", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
    return "\n".join(lines)


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> dict[str, str]:
    version = driver.version()
    rows = {"driver": f"serves CUDA up to {version[0]}.{version[1]}" if version else "none"}
    try:
        for gpu in driver.devices():
            capability = "{}.{}".format(*gpu.compute_capability)
            rows[f"GPU {gpu.index}"] = (
                f"{gpu.name}, compute capability {capability}, {gpu.n_sm} SMs, "
                f"{gpu.memory_bytes / 2**30:.1f} GiB, {gpu.smem_bytes} bytes of shared memory "
                f"for a CTA")
    except DashcupyError as error:
        rows["GPU"] = f"none ({error})"
    return rows


def _compilers() -> dict[str, str]:
    rows = {f"found {i}": f"{library}, compute capability {library.arch_range}"
            for i, library in enumerate(nvrtc.find_libraries())}
    try:
        rows["chosen"] = str(nvrtc.default_library())
    except DashcupyError as error:
        rows["chosen"] = f"none ({error})"
    return rows


def _cache() -> dict[str, str]:
    folder = cache.folder_or_none()
    if folder is None:
        return {"folder": "none (no home folder; set DASHCUPY_CACHE_DIR)"}
    try:
        sizes = [path.stat().st_size for path in folder.iterdir()]
    except OSError as error:
        return {"folder": str(folder), "files": f"none ({error.strerror})"}
    return {"folder": str(folder), "files": f"{len(sizes)} ({sum(sizes) / 2**20:.1f} MiB)"}
