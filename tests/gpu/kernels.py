"""Small kernels of the tests' own, compiled and loaded as dashcupy does it."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dashcupy import driver, nvrtc, source

# Keeps `threads` threads of every CTA busy for a number of clock cycles.
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
"""


def load(name: str, text: str, defines: Mapping[str, int | str] | None = None):
    """A CuPy RawKernel of this source, which may include what lies in ``cuda_src``."""
    import cupy

    library = nvrtc.default_library()
    capability = driver.device(cupy.cuda.runtime.getDevice()).compute_capability
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cuda_src"
        shutil.copytree(source.cuda_root(), root)
        (root / f"{name}.cu").write_text(text, encoding="utf-8")
        unit = source.expand(name, defines or {}, root)
        built = nvrtc.compile_cubin(unit, nvrtc.choose_arch(capability, library), library=library)
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(built.cubin)
        kernel = cupy.RawModule(path=str(path)).get_function(name)
        kernel.kernel.ptr  # noqa: B018 (loads it, while the file is there)
        return kernel


@functools.cache
def _spin_kernel(smem_bytes: int):
    kernel = load("spin", _SPIN)
    kernel.max_dynamic_shared_size_bytes = smem_bytes
    return kernel


def spin(n_cta: int, cycles: int, stream: int) -> None:
    """Occupy ``n_cta`` SMs, with all their shared memory, for ``cycles`` on a stream's handle."""
    import cupy
    import numpy as np

    class Stream:
        ptr = stream

    smem_bytes = driver.device(cupy.cuda.runtime.getDevice()).smem_bytes
    _spin_kernel(smem_bytes)((n_cta,), (128,), (np.int64(cycles),), shared_mem=smem_bytes,
                             stream=Stream)
