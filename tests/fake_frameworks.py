"""A torch, a JAX and others on the fake GPUs: just what dashcupy asks of the real ones."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from fake_gpu import CURRENT_DEVICE, FakeArray

TORCH_STREAM = 0x7000


class FakeTensor:
    """A torch CUDA tensor."""

    requires_grad = False
    is_cuda = True
    negative = False

    def __init__(self, shape, dtype="float16", device=0, strides=None):
        self._array = FakeArray(shape, dtype, device, strides)
        self.shape = self._array.shape
        self.dtype = f"torch.{dtype}"
        self.device = SimpleNamespace(type="cuda", index=device)

    def data_ptr(self):
        return self._array.data.ptr

    def stride(self):
        return tuple(stride // self._array.itemsize for stride in self._array.strides)

    def get_device(self):
        return self.device.index

    def is_neg(self):
        return self.negative

    def numel(self):
        return 1


def install_torch(monkeypatch) -> ModuleType:
    """A module ``torch`` whose tensors are `FakeTensor`."""
    torch = ModuleType("torch")
    torch.Tensor = FakeTensor
    for name in ("float16", "bfloat16", "float32", "float64", "uint8"):
        setattr(torch, name, f"torch.{name}")
    torch.empty = lambda *shape, dtype, device: FakeTensor(
        shape, dtype.removeprefix("torch."), device.index)
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: TORCH_STREAM + device)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


class FakeJaxArray:
    """A JAX array on GPUs; ``streams`` are those that consumers have passed to ``__dlpack__``."""

    def __init__(self, shape, dtype="float16", devices=(0,), platform="gpu", array=None):
        self.array = array or FakeArray(shape, dtype, devices[0])
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self._devices = {SimpleDevice(platform, index) for index in devices}
        self.streams = []

    def devices(self):
        return self._devices

    def __dlpack_device__(self):
        return 2, self.array.data.device_id

    def __dlpack__(self, stream):
        self.streams.append(stream)
        return self.array


class Foreign:
    """An array that only speaks DLPack."""

    def __init__(self, shape, dtype="float16", device=0, kind=2):
        self.kind, self.array, self.streams = kind, FakeArray(shape, dtype, device), []

    def __dlpack_device__(self):
        return self.kind, self.array.data.device_id

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array


class SimpleDevice:
    """A JAX device."""

    def __init__(self, platform, index):
        self.platform, self.local_hardware_id = platform, index

    def __repr__(self):
        return f"{self.platform}:{self.local_hardware_id}"


class FakeTracer(FakeJaxArray):
    """What jit, grad and vmap pass to the functions they trace."""


def install_jax(monkeypatch) -> ModuleType:
    """A module ``jax``; ``made`` are the arrays that it has allocated."""
    jax = ModuleType("jax")
    jax.Array = FakeJaxArray
    jax.core = SimpleNamespace(Tracer=FakeTracer)
    jax.made = []

    chosen = []

    @contextmanager
    def default_device(device):
        chosen.append(device)
        yield
        chosen.pop()

    def empty(shape, dtype):
        index = chosen[-1].local_hardware_id if chosen else CURRENT_DEVICE
        jax.made.append(FakeJaxArray(shape, dtype.name, (index,)))
        return jax.made[-1]

    jax.numpy = SimpleNamespace(empty=empty)
    jax.default_device = default_device
    jax.local_devices = lambda: [SimpleDevice("cpu", CURRENT_DEVICE), SimpleDevice("gpu", 0),
                                 SimpleDevice("gpu", 1)]
    jax.dlpack = SimpleNamespace(from_dlpack=lambda array: FakeJaxArray((), array=array))
    monkeypatch.setitem(sys.modules, "jax", jax)
    return jax
