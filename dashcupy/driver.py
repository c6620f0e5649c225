"""The CUDA driver through ctypes (no context is made), and CuPy when it is needed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import DeviceError

_ERROR_INVALID_CONTEXT = 201
_CAPTURE_MODE_RELAXED = 2
_LIBRARY_NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUdevice_attribute
_SM_COUNT, _MAJOR, _MINOR, _SMEM_OPTIN_BYTES = 16, 75, 76, 97


@dataclass(frozen=True)
class Device:
    """One GPU.

    Parameters
    ----------
    index
        Its number for the CUDA runtime, CuPy and torch.
    name
        The driver's name for it.
    compute_capability
        (major, minor).
    n_sm
        Streaming multiprocessors.
    memory_bytes
        Device memory.
    smem_bytes
        Shared memory that one CTA may ask for.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    n_sm: int
    memory_bytes: int
    smem_bytes: int


@functools.cache
def library() -> ctypes.CDLL | None:
    """The driver library; None where no driver is installed."""
    try:
        return ctypes.CDLL(_LIBRARY_NAME)
    except OSError:
        return None


def version() -> tuple[int, int] | None:
    """Newest CUDA version that the driver can serve, as (major, minor); None without a driver."""
    number = ctypes.c_int()
    if library() is None or library().cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if number.value else None


def devices() -> tuple[Device, ...]:
    """Every GPU that this process may see.

    Raises
    ------
    DeviceError
        No driver, or the driver does not start.
    """
    count = ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    return tuple(device(i) for i in range(count.value))


@functools.cache
def device(index: int) -> Device:
    """The GPU of that number; raises `DeviceError` if there is none."""
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(handle), index)
    call("cuDeviceGetName", name, len(name), handle)
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    return Device(index, name.value.decode(), (attribute(_MAJOR), attribute(_MINOR)),
                  attribute(_SM_COUNT), memory.value, attribute(_SMEM_OPTIN_BYTES))


def occupancy(function: int, threads: int, smem_bytes: int) -> int:
    """CTAs of a kernel that fit on one SM at the same time.

    Parameters
    ----------
    function
        CUfunction handle; its device is the current one.
    threads
        Threads of a CTA.
    smem_bytes
        Dynamic shared memory of a CTA.
    """
    count = ctypes.c_int()
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(count),
         ctypes.c_void_p(function), threads, ctypes.c_size_t(smem_bytes))
    return count.value


def call(name: str, *arguments) -> None:
    """Call the driver; anything but success is a `DeviceError` with the driver's own words."""
    if library() is None:
        raise DeviceError(f"no NVIDIA driver: {_LIBRARY_NAME} cannot be loaded; install the "
                          f"driver (in a container: pass the GPUs through), or give NumPy "
                          f"arrays to compute on the CPU")
    code = with_context(lambda: getattr(library(), name)(*arguments))
    if code != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"{name} failed with error {code} "
                          f"({text.value.decode() if text.value else 'unknown'}); "
                          f"`python -m dashcupy info` shows what the driver sees")


def with_context(call: Callable[[], int]) -> int:
    """Code of a driver call, made again where the thread has not yet used the GPU."""
    code = call()
    return call() if made_context(code) else code


def made_context(code: int) -> bool:
    """Whether a driver call with that code is to be made again, in a thread new to the GPU.

    Such a thread has no context, without which the driver refuses most calls; setDevice gives it
    the one of the GPU that is current for the runtime and CuPy.
    """
    if code != _ERROR_INVALID_CONTEXT:
        return False
    runtime = require_cupy().cuda.runtime
    runtime.setDevice(runtime.getDevice())
    return True


def on_device(device: int, function: Callable, *arguments: Any) -> Any:
    """Call with that GPU as the current one, and leave the thread as it was.

    The runtime, and CuPy with it, follow the context that is current for the driver. To switch
    there and back by setDevice would make a context on the GPU that it goes back to: hundreds of
    MB on a GPU that nobody may use.
    """
    cupy = require_cupy()
    try:
        current = cupy.cuda.runtime.getDevice()
    except RuntimeError as error:  # CuPy's
        raise DeviceError(f"CUDA does not answer: {error}; a process that was forked after its "
                          f"parent had used CUDA cannot use it: start it by spawn") from error
    if current == device:
        return function(*arguments)
    return sheltered(device, function, *arguments)


def sheltered(device: int, function: Callable, *arguments: Any) -> Any:
    """As `on_device`, for a function that may leave another GPU current.

    XLA does: its outermost scope does not put the thread's context back, and where there are
    several GPUs it is not always the one asked for.
    """
    call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        return function(*arguments)
    finally:
        library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context of a GPU that all frameworks share, kept as long as the process."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread what is unsafe while a CUDA graph is recorded, such as an allocation.

    In CUDA's "global" mode, torch's default, an unsafe call of any thread spoils the recording.
    Only for what no recorded work depends on.
    """
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_capturing(stream: int) -> bool:
    """Whether what is enqueued on a stream is recorded into a CUDA graph instead of run.

    Raises
    ------
    DeviceError
        An error has spoiled the recording, or the GPU.
    """
    # The legacy default stream (0 or 1) cannot be captured, and asking may be an error.
    if stream in (0, 1):
        return False
    try:
        return bool(require_cupy().cuda.runtime.streamIsCapturing(stream))
    except RuntimeError as error:  # CuPy's
        raise DeviceError(f"the stream cannot be used: {error}; an earlier call did what no "
                          f"recording of a CUDA graph allows, or an earlier kernel failed: run "
                          f"with CUDA_LAUNCH_BLOCKING=1") from error


def require_cupy() -> ModuleType:
    """Import CuPy, or say what to install.

    Raises
    ------
    DeviceError
        CuPy is not installed or cannot be imported.
    """
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise DeviceError(f"CuPy cannot be imported: {error}; install it again") from error
        extra = "cuda12" if (version() or (13,))[0] == 12 else "cuda13"
        raise DeviceError(f'computing on a GPU needs CuPy, which is not installed: '
                          f'pip install "dashcupy[{extra}]"') from None
    except OSError as error:
        # CuPy makes its own cache folder while it is imported.
        raise DeviceError(f"CuPy cannot be imported: {error}; if its cache folder cannot be "
                          f"made, set CUPY_CACHE_DIR to a writable one") from error
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be imported: {error}") from error
    return cupy
