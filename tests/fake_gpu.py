"""A CuPy and a driver that compute nothing: they record what would be launched, and where."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dashcupy import arguments, arrays, call, counters, driver, launch, modules, params, ready
from dashcupy.errors import DeviceError

STREAM = 0x5000
CURRENT_DEVICE = 0
# CUresult; function, grid, block, shared memory, stream, parameters
_SIGNATURE = (ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
              ctypes.c_void_p)
FUNCTIONS = {"fwd_sm80": 0xF0, "bwd_preprocess": 0xF1, "bwd_sm80": 0xF2, "fwd_sm90": 0xF3,
             "copy_rows": 0xF4, "bwd_sm90": 0xF5, "bwd_postprocess": 0xF6,
             "bwd_sm90_d64": 0xF7, "bwd_sm90_wide": 0xF8}
STRUCTS = {"fwd_sm80": "forward", "bwd_preprocess": "backward", "bwd_sm80": "backward",
           "fwd_sm90": "forward_sm90", "copy_rows": "copy", "bwd_sm90": "backward",
           "bwd_postprocess": "backward", "bwd_sm90_d64": "backward", "bwd_sm90_wide": "backward"}
SECOND_STRUCTS = dict.fromkeys(("bwd_sm90", "bwd_sm90_d64", "bwd_sm90_wide"), "backward_maps")
COUNTERS = 0x7000_0000
# CUresult; map, data type, rank, address, sizes, strides, box, element strides, interleave,
# swizzle, L2 promotion, fill
_ENCODE = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p,
           ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64),
           ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), *[ctypes.c_int] * 4)


class FakeArray:
    """What dashcupy sees of a cupy.ndarray; it has an address and no memory."""

    _addresses = itertools.count(1 << 40, 1 << 32)

    def __init__(self, shape, dtype="float16", device=0, strides=None, pointer=None):
        self.shape = tuple(shape)
        self.dtype = arrays.numpy_dtype(dtype)
        self.itemsize = self.dtype.itemsize
        elements = arguments.contiguous_strides(self.shape) if strides is None else strides
        self.strides = tuple(stride * self.itemsize for stride in elements)
        pointer = next(self._addresses) if pointer is None else pointer
        self.data = SimpleNamespace(ptr=pointer, device_id=device)


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: str
    grid: int
    threads: int
    smem_bytes: int
    stream: int
    cooperative: bool
    device: int  # the current one
    fields: dict  # of the parameter struct


class Map(NamedTuple):
    """One tensor map that was made; axes innermost first, strides in bytes."""

    pointer: int
    data_type: int
    sizes: tuple
    strides: tuple
    box: tuple
    options: tuple  # element strides, interleave, swizzle, L2 promotion, fill


class FakeGpu:
    """Two GPUs; ``launches`` and ``cleared`` are what was enqueued.

    Parameters
    ----------
    n_sm, per_sm
        SMs, and CTAs of any kernel that fit on one.
    """

    def __init__(self, compute_capability=(9, 0), n_sm=132, per_sm=1):
        self.compute_capability = compute_capability
        self.n_sm, self.per_sm = n_sm, per_sm
        self.launches: list[Launch] = []
        self.maps: list[Map] = []
        self.cleared: list[tuple[int, int]] = []
        self.codes: list[int] = []  # what the next launches return; then 0
        self.current = CURRENT_DEVICE
        self.capturing = False
        self.has_context = True  # the thread; the driver answers nothing without
        self.allocated: list[FakeArray] = []
        self.events: list[SimpleNamespace] = []
        self.report = np.zeros(8, np.uint32)
        self.cupy = SimpleNamespace(
            ndarray=FakeArray, empty=self._empty, from_dlpack=lambda x: x.__dlpack__(stream=STREAM),
            cuda=SimpleNamespace(
                get_current_stream=lambda device: SimpleNamespace(ptr=STREAM + device),
                Event=self._event,
                runtime=SimpleNamespace(
                    getDevice=lambda: self.current, setDevice=self._set_device,
                    memsetAsync=lambda pointer, value, n, stream: self.cleared.append((pointer, n)),
                    streamIsCapturing=lambda stream: self.capturing,
                    streamSynchronize=lambda stream: None, memcpy=self._memcpy,
                    memcpyDeviceToHost=2, malloc=lambda n_bytes: COUNTERS,
                    memset=lambda pointer, value, n_bytes: None, deviceSynchronize=lambda: None,
                    eventRecord=lambda event, stream: None)))
        # Real C functions, so that ctypes converts the arguments as it does for the driver's.
        self.library = SimpleNamespace(
            cuLaunchKernel=ctypes.CFUNCTYPE(*_SIGNATURE, ctypes.c_void_p)(
                lambda *arguments: self._launch(False, *arguments[:-1])),
            cuLaunchCooperativeKernel=ctypes.CFUNCTYPE(*_SIGNATURE)(
                lambda *arguments: self._launch(True, *arguments)),
            cuTensorMapEncodeTiled=ctypes.CFUNCTYPE(*_ENCODE)(self._encode),
            cuGetErrorString=lambda code, text: None)

    def _empty(self, shape, dtype):
        shape = (shape,) if isinstance(shape, int) else shape
        array = FakeArray(shape, np.dtype(dtype).name, self.current)
        self.allocated.append(array)
        return array

    def _event(self, disable_timing):
        event = SimpleNamespace(ptr=1, done=False)
        self.events.append(event)
        return event

    def _set_device(self, device):
        self.current, self.has_context = device, True

    def _occupancy(self, function, threads, smem_bytes):
        if not self.has_context:
            raise DeviceError("error 201")
        return self.per_sm

    def _memcpy(self, to, source, n_bytes, kind):
        ctypes.memmove(to, self.report.ctypes.data, n_bytes)

    def _encode(self, to, data_type, rank, pointer, sizes, strides, box, steps, *options):
        """Writes the number of the map, so that a launch tells which one it got."""
        if not self.has_context:
            return 201
        if to % 64 or pointer % 16 or any(stride % 16 for stride in strides[:rank - 1]):
            return 1
        self.maps.append(Map(pointer, data_type, tuple(sizes[:rank]), tuple(strides[:rank - 1]),
                             tuple(box[:rank]), (tuple(steps[:rank]), *options)))
        ctypes.memmove(to, struct.pack("<Q120x", len(self.maps)), 128)
        return 0

    def _launch(self, cooperative, function, gx, gy, gz, bx, by, bz, smem, stream, arguments):
        if self.codes and (code := self.codes.pop(0)):
            return code
        kernel = {handle: name for name, handle in FUNCTIONS.items()}[function]
        fields = self._fields(STRUCTS[kernel], arguments)
        if kernel in SECOND_STRUCTS:
            second = self._fields(SECOND_STRUCTS[kernel], arguments + struct.calcsize("P"))
            fields |= {f"{name}_map": value for name, value in second.items()}
        if (gy, gz, by, bz) != (1, 1, 1, 1):
            return 1  # an exception could not pass through C
        self.launches.append(
            Launch(kernel, gx, bx, smem, stream, cooperative, self.current, fields))
        return 0

    def _fields(self, kind, argument):
        layout = params.FIELDS[kind]
        address = ctypes.c_void_p.from_address(argument).value
        raw = ctypes.string_at(address, params.n_bytes(kind))
        values = struct.unpack_from("@" + "".join(code for _, code in layout), raw)
        return {name: self._map(value) if isinstance(value, bytes) else value
                for (name, _), value in zip(layout, values)}

    def _map(self, raw):
        """None for a map that was not made: all zeros."""
        number = int.from_bytes(raw[:8], "little")
        return self.maps[number - 1] if number else None

    def install(self, monkeypatch):
        """Put this in the place of CuPy, the driver and the compiler."""
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        monkeypatch.setattr(driver, "library", lambda: self.library)
        monkeypatch.setattr(driver, "occupancy", self._occupancy)
        monkeypatch.setattr(driver, "device", lambda index: driver.Device(
            index, f"Fake GPU {index}", self.compute_capability, self.n_sm, 1 << 30, 227 << 10))
        monkeypatch.setattr(modules, "load", lambda kernel, defines, device, smem_bytes:
                            SimpleNamespace(function=FUNCTIONS[kernel]))


@contextlib.contextmanager
def fake_gpu(monkeypatch, **options):
    """A `FakeGpu` in place, with the memories of real ones out of the way."""
    caches = (call._launcher, counters.of_device, launch._plain_launch, launch._cooperative_launch)
    gpu = FakeGpu(**options)
    gpu.install(monkeypatch)
    for cache in caches:
        cache.cache_clear()
    ready.forget()
    arrays._held.clear()
    try:
        yield gpu
    finally:
        for cache in caches:
            cache.cache_clear()
        ready.forget()
        arrays._held.clear()
