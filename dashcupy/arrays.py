"""Any array -> pointer, shape, strides, dtype, device and stream, and results of the same kind."""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import driver
from .errors import InvalidInputError
from .layout import Layout, dtype_name, layout_of_bytes, numpy_dtype

CPU = "cpu"
Device = int | str  # number of the GPU, or CPU
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
# What `Framework.look` saw: all but the addresses, as a key, and the addresses.
Seen = tuple[tuple[Any, ...], list[int]]
ALIGNMENT = 16  # bytes; addresses that are multiples suit every kernel and every dtype


class Borrowed(NamedTuple):
    """An array of the caller, looked at and not copied.

    Parameters
    ----------
    array
        What keeps the memory alive: the array itself, or a CuPy view of it.
    pointer
        Address of the first element; 0 on the CPU.
    layout, device
        See `Layout`; the GPU's number or ``CPU``.
    """

    array: Any
    pointer: int
    layout: Layout
    device: Device


class Framework:
    """Where arrays come from: how to look at one, make one, and on which stream to work."""

    name: str
    immutable = False  # results cannot be written into arrays of the caller
    # The memory is not reused in the order of the stream that the kernels run on, so arrays must
    # be kept until the GPU is done with them (see `hold`).
    holds = False
    # Memory that is allocated while a CUDA graph is captured is the graph's own.
    graph_owns_memory = False

    def borrow(self, x: Any, name: str) -> Borrowed:
        """Look at ``x``, which the caller knows as ``name``."""
        raise NotImplementedError

    def look(self, arrays: Sequence[Any]) -> Seen | None:
        """A quick look at arrays of a call, None among them, to know them again.

        Equal keys say: all that `borrow`, `read_only` and the type tell is equal, and all arrays
        are ready for the GPU, at multiples of ``ALIGNMENT``. None: not so, or no quick way.
        """
        key, pointers, bits = [], [], 0
        try:
            for x in arrays:
                if x is None:
                    key.append(None)
                    pointers.append(0)
                    continue
                pointer, seen = self._see(x)
                bits |= pointer
                pointers.append(pointer)
                key.append(seen)
        except Exception:  # another framework's array, or one without memory: `borrow_all` says so
            return None
        return None if bits % ALIGNMENT else (tuple(key), pointers)

    def _see(self, x: Any) -> tuple[int, tuple[Any, ...]]:
        """Address and key of one array for `look`; any error where there is none."""
        raise NotImplementedError

    def maker(self, like: Borrowed, shape: tuple[int, ...],
              dtype: str) -> Callable[[], tuple[Any, int]]:
        """What makes new memory on the GPU of ``like``, the current one: array and address.

        What lies in the memory is arbitrary. ``like`` itself is not kept alive.
        """
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """Handle of the stream on which the caller's next operation would run."""
        return require_cupy().cuda.get_current_stream(device).ptr

    def is_capturing(self, stream: int) -> bool:
        """Whether the work is being recorded into a CUDA graph."""
        return driver.is_capturing(stream)

    def deliver(self, result: Any) -> Any:
        """What `maker` made, as the caller gets it; asked only where ``holds``."""
        return result

    def to_numpy(self, borrowed: Borrowed) -> np.ndarray:
        """A NumPy view of an array on the CPU."""
        return np.asarray(borrowed.array)

    def from_numpy(self, array: np.ndarray, like: Borrowed) -> Any:
        """A result of the CPU backend as the caller gets it, beside ``like``."""
        return array

    def read_only(self, borrowed: Borrowed) -> bool:
        """Whether the array refuses to be written."""
        return False


class _NumPy(Framework):
    name = "NumPy"

    def borrow(self, x, name):
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidInputError(f"{name} is a masked array, and its mask would be ignored: "
                                    f"give {name}.filled(...) or {name}.data")
        return Borrowed(x, 0, Layout(x.shape, None, dtype_name(x.dtype)), CPU)

    def read_only(self, borrowed):
        return not borrowed.array.flags.writeable


class _CuPy(Framework):
    name = "CuPy"

    def borrow(self, x, name):
        layout = layout_of_bytes(x.shape, x.strides, x.dtype)
        if layout is None:
            raise InvalidInputError(f"{name} has strides of {x.strides} bytes, which are no "
                                    f"multiples of its elements; copy it: {name}.copy()")
        data = x.data
        return Borrowed(x, data.ptr, layout, data.device_id)

    def _see(self, x):
        data = x.data
        return data.ptr, (type(x), x.dtype, data.device_id, x.shape, x.strides)

    def maker(self, like, shape, dtype):
        empty, dtype = require_cupy().empty, numpy_dtype(dtype)

        def make():
            x = empty(shape, dtype)
            return x, x.data.ptr
        return make


class _Torch(Framework):
    name = "torch"
    graph_owns_memory = True

    def __init__(self, torch: ModuleType):
        self._torch = torch
        self._names = {getattr(torch, name): name for name in
                       ("float16", "bfloat16", "float32", "float64", "uint8")}
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        # Costs a tenth of torch.cuda.current_stream(device).cuda_stream, which makes an object.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def borrow(self, x, name):
        dtype = self._names.get(x.dtype) or str(x.dtype).removeprefix("torch.")
        try:
            on_gpu = x.is_cuda
            if not on_gpu and x.device.type != "cpu":
                raise InvalidInputError(f"{name} is on device {x.device} (allowed: cuda, cpu); "
                                        f"move it")
            pointer = x.data_ptr()
            if not pointer and x.numel():
                raise RuntimeError("the data pointer is null")
            if x.is_neg():
                raise InvalidInputError(f"{name} is a torch tensor whose memory holds the negated "
                                        f"values (x.is_neg()): give {name}.resolve_neg()")
            if on_gpu:
                return Borrowed(x, pointer, Layout(x.shape, x.stride(), dtype), x.get_device())
            return Borrowed(x, 0, Layout(tuple(x.shape), None, dtype), CPU)
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidInputError(
                f"{name} is a torch tensor without memory of its own (sparse, or traced by "
                f"torch.compile, vmap or a fake mode): give a plain strided tensor. torch says: "
                f"{error}") from error

    def _see(self, x):
        pointer = x.data_ptr()
        if not pointer or not x.is_cuda or x.is_neg():
            raise ValueError("`borrow` knows what it is")
        return pointer, (type(x), x.dtype, x.get_device(), x.requires_grad, x.shape, x.stride())

    def maker(self, like, shape, dtype):
        # A plain tensor, whatever subclass the caller has; torch's allocator hands the memory out
        # again in the order of its current stream, on which the kernels run. Sizes one by one
        # spare torch a third of the time that it takes to read a tuple.
        empty = functools.partial(self._torch.empty, *shape, dtype=self._dtypes[dtype],
                                  device=like.array.device)

        def make():
            x = empty()
            return x, x.data_ptr() or self.borrow(x, "result").pointer
        return make

    def stream(self, device):
        if self._raw_stream is not None:
            return self._raw_stream(device)
        return self._torch.cuda.current_stream(device).cuda_stream

    def to_numpy(self, borrowed):
        x = borrowed.array.detach()
        if borrowed.layout.dtype != "bfloat16":
            return x.numpy()
        return x.view(self._torch.int16).numpy().view(numpy_dtype("bfloat16"))

    def from_numpy(self, array, like):
        if dtype_name(array.dtype) != "bfloat16":
            return self._torch.from_numpy(array)
        return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)

    def read_only(self, borrowed):
        # torch refuses such an `out=` too: its autograd would not see the write.
        return borrowed.array.requires_grad


class _Dlpack(Framework):
    """Anything else with ``__dlpack__``: looked at through CuPy, results are CuPy arrays."""

    name = "DLPack"
    holds = True

    def borrow(self, x, name):
        kind, index = x.__dlpack_device__()
        if kind not in _DLPACK_CUDA:
            raise InvalidInputError(
                f"{name} is a {_type_name(x)} on a device of DLPack kind {int(kind)} (allowed: "
                f"CUDA memory); for memory of the CPU give numpy.from_dlpack({name})")
        driver.device(int(index))  # where there is no such GPU, says so better than CuPy
        # CuPy passes its current stream: the producer makes it wait for what is not yet written.
        return CUPY.borrow(driver.on_device(int(index), require_cupy().from_dlpack, x), name)

    def maker(self, like, shape, dtype):
        return CUPY.maker(like, shape, dtype)


class _Jax(Framework):
    name = "JAX"
    immutable = True
    holds = True

    def __init__(self, jax: ModuleType):
        self._jax = jax

    def borrow(self, x, name):
        if isinstance(x, self._jax.core.Tracer):
            raise _traced(name)
        devices = x.devices()
        platforms = {device.platform for device in devices}
        if len(devices) != 1 or not platforms <= {"gpu", "cuda", "cpu"}:
            raise InvalidInputError(f"{name} lies on {sorted(map(str, devices))} (allowed: one "
                                    f"CUDA GPU, or the CPU); gather it with jax.device_put")
        if platforms == {"cpu"}:
            return Borrowed(x, 0, Layout(x.shape, None, dtype_name(x.dtype)), CPU)
        index, = (device.local_hardware_id for device in devices)
        return CUPY.borrow(driver.sheltered(index, require_cupy().from_dlpack, x), name)

    def maker(self, like, shape, dtype):
        if dtype == "uint8":
            return CUPY.maker(like, shape, dtype)  # workspace: JAX never sees it
        # Memory of JAX, not of CuPy's pool. The pool would take a result back as soon as the
        # caller drops it, and hand it out on CuPy's stream while JAX's stream may still read it.
        device = next(d for d in self._jax.local_devices()
                      if d.platform in ("gpu", "cuda") and d.local_hardware_id == like.device)

        def make():
            # device= would make it on JAX's default GPU and move it: it came after our kernels.
            with self._jax.default_device(device):
                x = self._concrete(self._jax.numpy.empty(shape, numpy_dtype(dtype)))
            return (view := require_cupy().from_dlpack(x)), view.data.ptr
        return functools.partial(driver.sheltered, like.device, make)

    def deliver(self, result):
        # JAX passes its stream to CuPy, which makes it wait for the kernels just launched.
        return driver.sheltered(result.data.device_id, self._jax.dlpack.from_dlpack, result)

    def from_numpy(self, array, like):
        return self._concrete(self._jax.device_put(array, next(iter(like.array.devices()))))

    def _concrete(self, result: Any) -> Any:
        if isinstance(result, self._jax.core.Tracer):
            raise _traced("a result made while JAX traces the function around this call")
        return result


NUMPY, CUPY, DLPACK = _NumPy(), _CuPy(), _Dlpack()
require_cupy = driver.require_cupy
_torch = functools.cache(_Torch)
_jax = functools.cache(_Jax)
_by_type: dict[type, Framework] = {}  # types seen before; the search takes ten times as long


def framework_of(x: Any, name: str) -> Framework:
    """The framework of an array; imports none.

    Raises
    ------
    InvalidInputError
        Not an array, or one that has no memory (a JAX tracer).
    """
    found = _by_type.get(type(x))
    if found is None:
        found = _by_type[type(x)] = _find_framework(x, name)
    return found


def _find_framework(x: Any, name: str) -> Framework:
    # A framework that made x is in sys.modules already. isinstance, and not the module's name of
    # the type, so that subclasses such as torch.nn.Parameter are found.
    cupy, torch, jax = (sys.modules.get(key) for key in ("cupy", "torch", "jax"))
    if isinstance(x, np.ndarray):
        return NUMPY
    if cupy is not None and isinstance(x, cupy.ndarray):
        return CUPY
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch(torch)
    if jax is not None and isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer):
            raise _traced(name)
        return _jax(jax)
    # A class has the methods of its instances, and no memory.
    if not isinstance(x, type) and hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPACK
    raise InvalidInputError(
        f"{name} is a {_type_name(x)}, not an array (allowed: NumPy, CuPy, torch, JAX, or "
        f"anything with __dlpack__ on a CUDA device); convert it, for example with "
        f"numpy.asarray or cupy.asarray")


def borrow_all(names: Sequence[str], arrays: Sequence[Any]) -> tuple[Framework, list[Borrowed]]:
    """Look at arrays that must come from one framework and lie on one device.

    Raises
    ------
    InvalidInputError
        They are mixed, or one of them is no array.
    """
    framework = framework_of(arrays[0], names[0])
    borrowed = [framework.borrow(arrays[0], names[0])]
    device = borrowed[0].device
    for name, x in zip(names[1:], arrays[1:]):
        if framework_of(x, name) is not framework:
            raise InvalidInputError(
                f"{names[0]} is a {_type_name(arrays[0])} and {name} a {_type_name(x)}: all "
                f"arrays must come from one framework; convert one of them (numpy.asarray, "
                f"cupy.asarray, torch.as_tensor, from_dlpack)")
        b = framework.borrow(x, name)
        if b.device != device:
            raise InvalidInputError(
                f"{names[0]} is on {device_text(device)} and {name} on {device_text(b.device)}: "
                f"all arrays must be on one device; move one of them")
        borrowed.append(b)
    return framework, borrowed


def device_text(device: Device) -> str:
    """A device in words."""
    return "the CPU" if device == CPU else f"GPU {device}"


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _traced(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} is a JAX tracer, which has no memory: call this outside jit, grad and vmap (it "
        f"launches kernels at once), or use dashcupy.jax.attention, which works inside them")


_held: deque[tuple[Any, list[Any]]] = deque()
_held_guard = threading.Lock()


def hold(stream: int, arrays: list[Any]) -> None:
    """Keep arrays alive until the work enqueued on ``stream`` so far is done; does not wait.

    For arrays of frameworks that order their memory by streams of their own: a caller may drop
    such an array while the kernels still wait for their turn on ours. What is done is let go at
    the next call.
    """
    cuda = require_cupy().cuda
    event = cuda.Event(disable_timing=True)
    cuda.runtime.eventRecord(event.ptr, stream)
    with _held_guard, driver.relaxed_capture():  # to ask an event is unsafe for CUDA
        _held.append((event, arrays))
        while _held and _held[0][0].done:
            _held.popleft()
