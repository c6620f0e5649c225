"""A CuPy and a driver that compute nothing: they record what would be launched, and where."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dashcupy import (
    arguments, arrays, call, counters, driver, kernel_launch, modules, params, ready)
from dashcupy.config_sm90 import BACKWARD_KERNELS

STREAM = 0x5000
CURRENT_DEVICE = 0
FUNCTIONS = {"fwd_sm80": 0xF0, "bwd_preprocess": 0xF1, "bwd_sm80": 0xF2, "fwd_sm90": 0xF3,
             "copy_rows": 0xF4, "bwd_sm90": 0xF5, "bwd_postprocess": 0xF6,
             "bwd_sm90_d64": 0xF7, "bwd_sm90_d256": 0xF8, "bwd_sm90_d192": 0xF9}
STRUCTS = {"fwd_sm80": "forward", "bwd_preprocess": "backward", "bwd_sm80": "backward",
           "fwd_sm90": "forward_sm90", "copy_rows": "copy", "bwd_postprocess": "backward",
           **dict.fromkeys(BACKWARD_KERNELS, "backward")}
SECOND_STRUCTS = dict.fromkeys(BACKWARD_KERNELS, "backward_maps")
COUNTERS = 0x7000_0000
SETTING_UP = 0x6000  # the stream on which counters are made
# CUresult; map, data type, rank, address, sizes, strides, box, element strides, interleave,
# swizzle, L2 promotion, fill
_ENCODE = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p,
           ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64),
           ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), *[ctypes.c_int] * 4)
# CUlaunchConfig: grid, block, shared memory, stream, attributes and how many. CUlaunchAttribute: id
# and a union of 64 bytes.
_LAUNCH_CONFIG, _ATTRIBUTE = "@7IPPI", "@i4xi60x"
_COOPERATIVE, _CLUSTER_DIMENSION, _EARLY = 2, 4, 6  # CUlaunchAttributeID
_INT, _HANDLE = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
_CONTEXT = 0xC000  # handle of the context of GPU 0
_NO_CONTEXT = 201
GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode


def _read_config(config):
    """Sizes and stream of a CUlaunchConfig, and its attributes: the first word of each, by id."""
    *values, attributes, count = struct.unpack(
        _LAUNCH_CONFIG, ctypes.string_at(config, struct.calcsize(_LAUNCH_CONFIG)))
    return *values, dict(struct.iter_unpack(_ATTRIBUTE, ctypes.string_at(
        attributes, count * struct.calcsize(_ATTRIBUTE))))


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


def backward_inputs(q_shape, k_shape, dtype="bfloat16"):
    """What `attention_backward` needs, by name, all in C order."""
    shapes = {"dout": q_shape, "q": q_shape, "k": k_shape, "v": k_shape, "out": q_shape}
    batch, length, n_head, _ = q_shape
    return {name: FakeArray(shape, dtype) for name, shape in shapes.items()} | {
        "lse": FakeArray((batch, n_head, length), "float32")}


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: str
    grid: int
    threads: int
    smem_bytes: int
    stream: int
    cooperative: bool
    early: bool  # may start before the launch before it has ended
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
        self._guard = threading.Lock()
        self.codes: list[int] = []  # what the next launches return; then 0
        # What the runtime says is the current GPU of a thread without contexts, and the GPUs that
        # have one, and lost memory to it.
        self._thread = threading.local()
        self.stack.append(CURRENT_DEVICE)
        self.device = CURRENT_DEVICE
        self.contexts = {CURRENT_DEVICE}
        self.capturing = False  # the current stream
        self.capture_mode = GLOBAL  # what the thread may do while some thread records a graph
        self.unsafe: list[str] = []  # calls that would have spoiled such a recording
        self.allocated: list[FakeArray] = []
        self.events: list[_Event] = []
        self.report = np.zeros(8, np.uint32)
        self.cupy = SimpleNamespace(
            ndarray=FakeArray, empty=self._empty, from_dlpack=self._from_dlpack,
            cuda=SimpleNamespace(
                get_current_stream=lambda device: SimpleNamespace(ptr=STREAM + device),
                Event=self._event,
                runtime=SimpleNamespace(
                    getDevice=lambda: self.current, setDevice=self._set_device,
                    streamCreateWithFlags=lambda flags: SETTING_UP, streamDestroy=lambda stream: 0,
                    memsetAsync=self._memset,
                    streamIsCapturing=lambda stream: self.capturing,
                    streamSynchronize=lambda stream: None, memcpy=self._memcpy,
                    memcpyDeviceToHost=2, malloc=self._malloc,
                    eventRecord=lambda event, stream: None)))
        # Real C functions, so that ctypes converts the arguments as it does for the driver's.
        self.library = SimpleNamespace(
            cuLaunchKernelEx=ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(
                self._launch_ex),
            cuTensorMapEncodeTiled=ctypes.CFUNCTYPE(*_ENCODE)(self._encode),
            cuOccupancyMaxActiveBlocksPerMultiprocessor=ctypes.CFUNCTYPE(
                ctypes.c_int, _INT, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)(
                    self._occupancy),
            cuOccupancyMaxActiveClusters=ctypes.CFUNCTYPE(
                ctypes.c_int, _INT, ctypes.c_void_p, ctypes.c_void_p)(self._clusters),
            cuInit=lambda flags: 0,
            cuDeviceGet=ctypes.CFUNCTYPE(ctypes.c_int, _INT, ctypes.c_int)(self._device_get),
            cuDevicePrimaryCtxRetain=ctypes.CFUNCTYPE(ctypes.c_int, _HANDLE, ctypes.c_int)(
                self._retain),
            cuCtxPushCurrent_v2=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._push),
            cuCtxPopCurrent_v2=ctypes.CFUNCTYPE(ctypes.c_int, _HANDLE)(self._pop),
            cuThreadExchangeStreamCaptureMode=ctypes.CFUNCTYPE(ctypes.c_int, _INT)(
                self._exchange_mode),
            cuGetErrorString=lambda code, text: None)

    def _empty(self, shape, dtype):
        shape = (shape,) if isinstance(shape, int) else shape
        array = FakeArray(shape, np.dtype(dtype).name, self.current)
        self.allocated.append(array)
        return array

    def _from_dlpack(self, x):
        device, before = x.__dlpack_device__()[1], self.current
        self._set_device(device)  # as CuPy does it
        try:
            return x.__dlpack__(stream=STREAM)
        finally:
            self._set_device(before)

    def _event(self, disable_timing):
        event = _Event(self)
        self.events.append(event)
        return event

    @property
    def stack(self):
        """Contexts of this thread, the current one last; without one the driver refuses."""
        return self._thread.__dict__.setdefault("stack", [])

    @property
    def current(self):
        """What the runtime says is the current GPU."""
        return self.stack[-1] if self.stack else self.device

    def _set_device(self, device):
        self.device, self.stack[-1:] = device, [device]
        self.contexts.add(device)

    def _device_get(self, to, device):
        to[0] = device
        return 0

    def _retain(self, to, device):
        self.contexts.add(device)
        to[0] = _CONTEXT + device
        return 0

    def _push(self, context):
        self.stack.append(context - _CONTEXT)
        return 0

    def _pop(self, to):
        to[0] = _CONTEXT + self.stack.pop()
        return 0

    def _exchange_mode(self, mode):
        self.capture_mode, mode[0] = mode[0], self.capture_mode
        return 0

    def _malloc(self, n_bytes):
        if self.capture_mode != RELAXED:
            self.unsafe.append("malloc")
        return COUNTERS

    def _memset(self, pointer, value, n_bytes, stream):
        if stream != SETTING_UP:
            self.cleared.append((pointer, n_bytes))

    def _occupancy(self, to, function, threads, smem_bytes):
        if not self.stack:
            return _NO_CONTEXT
        to[0] = self.per_sm
        return 0

    def _clusters(self, to, function, config):
        """As many as SMs give, two CTAs a cluster: the driver asks for its size as an attribute."""
        if not self.stack:
            return _NO_CONTEXT
        *_, attributes = _read_config(config)
        to[0] = self.n_sm // attributes[_CLUSTER_DIMENSION]
        return 0

    def _load(self, kernel, defines, device, smem_bytes):
        if self.capture_mode != RELAXED:
            self.unsafe.append("load")
        return SimpleNamespace(function=FUNCTIONS[kernel])

    def _memcpy(self, to, source, n_bytes, kind):
        ctypes.memmove(to, self.report.ctypes.data, n_bytes)

    def _encode(self, to, data_type, rank, pointer, sizes, strides, box, steps, *options):
        """Writes the number of the map, so that a launch tells which one it got."""
        if not self.stack:
            return _NO_CONTEXT
        if (to % 64 or pointer % 16 or pointer == 0 or not all(
                0 < stride < 1 << 40 and stride % 16 == 0 for stride in strides[:rank - 1])
                or not all(0 < size <= 1 << 32 for size in sizes[:rank])
                or not all(0 < rows <= 256 for rows in box[:rank])):
            return 1
        with self._guard:
            self.maps.append(Map(pointer, data_type, tuple(sizes[:rank]), tuple(strides[:rank - 1]),
                                 tuple(box[:rank]), (tuple(steps[:rank]), *options)))
            number = len(self.maps)
        ctypes.memmove(to, struct.pack("<Q120x", number), 128)
        return 0

    def _launch_ex(self, config, function, arguments, extra):
        *sizes_and_stream, attributes = _read_config(config)
        return self._launch({number for number, flag in attributes.items() if flag == 1}, function,
                            *sizes_and_stream, arguments)

    def _launch(self, attributes, function, gx, gy, gz, bx, by, bz, smem, stream, arguments):
        if not self.stack:
            return _NO_CONTEXT
        if self.codes and (code := self.codes.pop(0)):
            return code
        kernel = {handle: name for name, handle in FUNCTIONS.items()}[function]
        fields = self._fields(STRUCTS[kernel], arguments)
        if kernel in SECOND_STRUCTS:
            second = self._fields(SECOND_STRUCTS[kernel], arguments + struct.calcsize("P"))
            fields |= {f"{name}_map": value for name, value in second.items()}
        if (gy, gz, by, bz) != (1, 1, 1, 1) or not 0 < gx < 1 << 31 or stream == 0:
            return 1  # an exception could not pass through C
        self.launches.append(
            Launch(kernel, gx, bx, smem, stream, _COOPERATIVE in attributes,
                   _EARLY in attributes, self.current, fields))
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
        monkeypatch.setattr(driver, "device", lambda index: driver.Device(
            index, f"Fake GPU {index}", self.compute_capability, self.n_sm, 1 << 30, 227 << 10))
        monkeypatch.setattr(modules, "load", self._load)


class _Event:
    """Its `ptr`, and whether it is `done`."""

    ptr = 1

    def __init__(self, gpu):
        self._gpu, self._done = gpu, False

    @property
    def done(self):
        if self._gpu.capture_mode != RELAXED:
            self._gpu.unsafe.append("event query")
        return self._done

    @done.setter
    def done(self, value):
        self._done = value


@contextlib.contextmanager
def fake_gpu(monkeypatch, **options):
    """A `FakeGpu` in place, with the memories of real ones out of the way."""
    caches = (call._launcher, counters.of_device, kernel_launch._launch, driver._primary_context)
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
