"""Where the check computes, and what it asks of a GPU: CUDA graphs and load, with a fake CuPy."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dashcupy import driver, nvrtc
from dashcupy.check import cases, device, inputs, load, run, subject
from dashcupy.errors import DashcupyError, DeviceError, UnsupportedError
from dashcupy.problem import Problem


@pytest.mark.parametrize("devices, why", [
    ([], "the driver sees no GPU"),
    ([(7, 5)], "Old GPU has compute capability 7.5; the kernels need 8.0"),
    (None, "no NVIDIA driver"),
])
def test_without_a_usable_gpu_the_cpu_is_taken_and_the_reason_told(monkeypatch, devices, why):
    def found():
        if devices is None:
            raise DeviceError("no NVIDIA driver")
        return tuple(driver.Device(0, "Old GPU", capability, 40, 1 << 30, 64 << 10)
                     for capability in devices)
    monkeypatch.setattr(driver, "devices", found)
    monkeypatch.setattr(driver, "require_cupy", lambda: None)
    place = device.choose_place("auto")
    assert (place.kind, place.target) == ("cpu", "cpu") and why in place.why
    with pytest.raises(DashcupyError, match=why):
        device.choose_place("gpu")


class Array(np.ndarray):
    """As much of a cupy.ndarray as a recording needs."""

    @property
    def data(self):
        return SimpleNamespace(memset_async=lambda byte, n_bytes, stream: self.view(
            np.uint8).fill(byte))


class Stream:
    """What is enqueued between begin_capture and end_capture runs at each launch, and only then."""

    def __init__(self, **_):
        self.recorded, self.log = None, []

    def begin_capture(self):
        self.recorded = []

    def end_capture(self):
        work, self.recorded = self.recorded, None
        self.log.append("end")

        def launch(stream):
            self.log.append("launch")
            for function in work:
                function()
        return SimpleNamespace(launch=launch)

    def enqueue(self, function):
        if self.recorded is None:
            function()
        else:
            self.recorded.append(function)

    def synchronize(self):
        self.log.append("synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """(subject on a fake Hopper GPU, its stream); NumPy computes."""
    stream = Stream()
    cupy = SimpleNamespace(
        empty_like=lambda x: np.zeros_like(x).view(Array), empty=np.empty,
        cuda=SimpleNamespace(Stream=lambda **_: stream, runtime=SimpleNamespace(
            deviceSynchronize=lambda: None, getDevice=lambda: 0)))
    monkeypatch.setattr(driver, "require_cupy", lambda: cupy)

    def writing(real, kind):
        def function(*args, workspace=None, **options):
            into = options.pop("out" if kind == "forward" else "grads")
            results = real(*args, **options)
            if into is None:
                return results
            if kind == "backward":
                assert workspace is not None  # else a replay would write into memory of others

            def write():
                for x, result in zip(into, results):
                    x[...] = result
            stream.enqueue(write)
            return into
        return function

    monkeypatch.setattr(subject, "attention", writing(subject.attention, "forward"))
    monkeypatch.setattr(subject, "attention_backward",
                        writing(subject.attention_backward, "backward"))
    place = device.Place("gpu", (9, 0), "Fake GPU", "a test", "fake", lambda x: x, np.asarray, None)
    return subject.Dashcupy(place), stream


CASE = cases.Case("a test", "normal", Problem(1, 40, 50, 2, 1, 16, "float16", "causal", 0.25))


def test_a_graph_is_replayed_into_memory_that_was_overwritten(gpu):
    ours, stream = gpu
    result = run.run_case(ours, CASE, ["ascending"], run.Settings(1, ("graph",)))
    assert result.ok and [r.tests for r in result.runs] == [{"graph": "equal"}] * 2
    assert stream.log == ["synchronize", "end", "launch", "synchronize"] * 2


def test_other_bits_of_a_graph_are_found(gpu, monkeypatch):
    ours, stream = gpu
    monkeypatch.setattr(stream, "enqueue", lambda function: None)  # the graph writes nothing
    result = run.run_case(ours, CASE, ["ascending"], run.Settings(1, ("graph",)))
    assert not result.ok and {t.differences[0].test for r in result.runs for t in r.tensors} == {
        "graph"}
    assert result.runs[1].tensors[0].differences[0].got == "0xffff"  # a NaN that nobody wrote over


def test_a_recording_that_is_refused_ends_and_is_no_failure(gpu, monkeypatch):
    ours, stream = gpu
    real = subject.attention

    def attention(*args, **options):
        if stream.recorded is not None:
            raise UnsupportedError("arrays are copied first")
        return real(*args, **options)
    monkeypatch.setattr(subject, "attention", attention)
    result = run.run_case(ours, CASE, [], run.Settings(1, ("graph",)))
    assert result.ok and result.runs[0].tests == {"graph": "arrays are copied first"}
    assert stream.recorded is None and "end" in stream.log


def test_the_load_takes_another_number_of_sms_for_another_time(monkeypatch):
    launches = []
    stream = contextlib.nullcontext()
    stream.synchronize = lambda: launches.append("synchronize")
    monkeypatch.setattr(driver, "require_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(
        Stream=lambda non_blocking: stream, runtime=SimpleNamespace(getDevice=lambda: 0))))
    monkeypatch.setattr(driver, "device", lambda i: SimpleNamespace(smem_bytes=1000))

    def kernel(grid, block, args, shared_mem):
        launches.append((grid[0], int(args[0]), shared_mem))
    monkeypatch.setattr(load.modules, "load", lambda name, defines, device, smem_bytes:
                        SimpleNamespace(raw=kernel))
    with load.on_gpu() as nudge:
        for i in range(3):
            nudge(i)
    assert launches == [(10, 60_000, 1000), (47, 110_000, 1000), (84, 160_000, 1000), "synchronize"]


def test_inputs_go_to_a_gpu_and_back_as_bytes(monkeypatch):
    """CuPy knows bfloat16 only in part; the place must not need it to."""
    gpu = driver.Device(0, "GPU", (9, 0), 132, 1 << 30, 228 << 10)
    moved = []

    def asarray(x):
        moved.append(x.dtype)
        return x
    monkeypatch.setattr(driver, "devices", lambda: (gpu,))
    monkeypatch.setattr(driver, "require_cupy", lambda: SimpleNamespace(
        __version__="14", asarray=asarray,
        ascontiguousarray=lambda x: SimpleNamespace(view=lambda kind: SimpleNamespace(
            get=lambda: np.ascontiguousarray(x).view(kind)))))
    monkeypatch.setattr(nvrtc, "default_library", lambda: SimpleNamespace(version=(13, 5)))
    place = device.choose_place("gpu")
    x = inputs.make_inputs("normal", CASE.problem)["q"].swapaxes(1, 2)
    assert np.array_equal(place.get(place.put(x)).view(np.uint16), x.view(np.uint16))
    assert moved == [np.uint8] and place.arithmetic == "nvrtc-13.5"
