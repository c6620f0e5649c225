"""Where `python -m dashcupy check` computes: on the first GPU through CuPy, or in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from .. import cpu, driver, nvrtc
from ..config import Target
from ..errors import DashcupyError, DeviceError, UnsupportedError
from ..nvrtc import MIN_CAPABILITY
from . import load

DEVICES = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Place:
    """Where to compute, and why there.

    Parameters
    ----------
    kind
        ``"cpu"`` or ``"gpu"``.
    target
        What `dashcupy.plan.make_plan` calls it; None where its kernels are not used.
    title, why
        For a person; on the CPU the title names the arithmetic that bits depend on there.
    arithmetic
        What bits depend on beside a plan's fingerprint: NVRTC's version, or NumPy's sums.
    put, get
        From a NumPy array to an array there, and back (waits for the result).
    load
        Makes other work there while its context is entered, see `dashcupy.check.load`.
    """

    kind: str
    target: Target | None
    title: str
    why: str
    arithmetic: str
    put: Callable[[np.ndarray], object]
    get: Callable[[object], np.ndarray]
    load: Callable[[], AbstractContextManager[Callable[[int], None]]]


def choose_place(device: str = "auto") -> Place:
    """The place that ``--device`` asks for; ``"auto"`` is the GPU if it can be used.

    Raises
    ------
    DeviceError
        The GPU is asked for and cannot be used.
    """
    if device == "cpu":
        return _cpu("--device cpu was given")
    try:
        return _gpu()
    except DashcupyError as error:
        if device == "gpu":
            raise
        return _cpu(str(error))


def _cpu(why: str) -> Place:
    arithmetic = cpu.arithmetic_id()
    return Place("cpu", "cpu", f"CPU, {arithmetic}", why, arithmetic, _read_only, np.asarray,
                 load.on_cpu)


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view through which nobody can change the inputs."""
    view = array.view()
    view.flags.writeable = False
    return view


def _gpu() -> Place:
    devices = driver.devices()
    if not devices:
        raise DeviceError("the driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, or the "
                          "container has none)")
    gpu, cupy = devices[0], driver.require_cupy()
    capability = "{}.{}".format(*gpu.compute_capability)
    if gpu.compute_capability < MIN_CAPABILITY:
        raise UnsupportedError(f"{gpu.name} has compute capability {capability}; the kernels need "
                               f"{'{}.{}'.format(*MIN_CAPABILITY)} (Ampere) or newer")

    def put(array: np.ndarray) -> object:
        # As bytes: copying needs no kernel then, and no knowledge of bfloat16.
        return cupy.asarray(np.ascontiguousarray(array).view(np.uint8)).view(array.dtype)

    def get(array: object) -> np.ndarray:
        return cupy.ascontiguousarray(array).view(np.uint8).get().view(array.dtype)

    version = "{}.{}".format(*nvrtc.default_library().version)
    return Place("gpu", gpu.compute_capability,
                 f"{gpu.name}, compute capability {capability}, {gpu.n_sm} SMs, CuPy "
                 f"{cupy.__version__}, NVRTC {version}", "a GPU and CuPy are there",
                 f"nvrtc-{version}", put, get, load.on_gpu)
