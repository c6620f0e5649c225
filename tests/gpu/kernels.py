"""Small kernels of the tests' own, compiled and loaded as dashcupy does it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dashcupy import driver, nvrtc, source
from dashcupy.check import load as check_load


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


def spin(n_cta: int, cycles: int, stream: int) -> None:
    """Occupy ``n_cta`` SMs, with all their shared memory, for ``cycles`` on a stream's handle."""
    import cupy

    check_load.spin(n_cta, cycles, cupy.cuda.ExternalStream(stream))
