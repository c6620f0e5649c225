"""Loading a kernel: the memo, shared memory, and the errors where something is missing."""

import sys
import threading
import types

import pytest

from dashcupy import cache, driver, modules, nvrtc, source
from dashcupy.errors import CompileError, DeviceError, UnsupportedError

KERNEL = """
extern "C" __global__ void tiny(float* x) {
  __shared__ float fixed[256];
  fixed[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = fixed[255 - threadIdx.x] + DC_ADD;
}
"""
DEFINES = (("DC_ADD", 1),)
H200 = driver.Device(0, "H200", (9, 0), 132, 140 << 30, 232448)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    root = tmp_path / "cuda_src"
    root.mkdir()
    (root / "tiny.cu").write_text(KERNEL)
    monkeypatch.setattr(source, "cuda_root", lambda: root)
    monkeypatch.setenv("DASHCUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_private", None)
    monkeypatch.setattr(modules, "_loaded", {})


@pytest.fixture
def fake_cupy(monkeypatch):
    """A CuPy that writes down what it is told."""
    if not nvrtc.find_libraries():
        pytest.skip("no NVRTC here: pip install 'dashcupy[test]'")
    fake = types.SimpleNamespace(devices=[], modules=[], functions=[])

    class RawModule:
        def __init__(self, path):
            fake.modules.append(path)

        def get_function(self, name):
            function = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=1234))
            fake.functions.append(function)
            return function

    def on_device(index, function):
        fake.devices.append(index)
        return function()

    fake.RawModule = RawModule
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(driver, "on_device", on_device)
    monkeypatch.setattr(driver, "device", lambda index: H200)
    return fake


def test_a_kernel_is_loaded_once(fake_cupy):
    kernel = modules.load("tiny", DEFINES, 0)
    assert (kernel.name, kernel.arch, kernel.device_id, kernel.function) == (
        "tiny", "sm_90a", 0, 1234)
    assert kernel.raw is fake_cupy.functions[0] and str(kernel.path) == fake_cupy.modules[0]
    assert kernel.resources.static_smem_bytes == 1024
    assert modules.load("tiny", DEFINES, 0) is kernel
    assert modules.load("tiny", dict(DEFINES), 0) is kernel
    assert len(fake_cupy.modules) == 1
    assert modules.load("tiny", (("DC_ADD", 2),), 0) is not kernel
    assert modules.load("tiny", DEFINES, 1).device_id == 1
    assert fake_cupy.devices == [0, 0, 1] and len(fake_cupy.modules) == 3


def test_threads_load_once(fake_cupy):
    barrier, kernels = threading.Barrier(8), []

    def work():
        barrier.wait()
        kernels.append(modules.load("tiny", DEFINES, 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8 and len(set(map(id, kernels))) == 1
    assert len(fake_cupy.modules) == 1


@pytest.mark.parametrize("smem_bytes, asked", [
    (0, None), (48 * 1024 - 1024, None), (48 * 1024 - 1023, 48 * 1024 - 1023),
    (232448 - 1024, 232448 - 1024)])
def test_more_than_48_kib_is_asked_for(fake_cupy, smem_bytes, asked):
    """Without it a launch ends in 'invalid argument'; fixed shared memory counts too."""
    modules.load("tiny", DEFINES, 0, smem_bytes=smem_bytes)
    assert getattr(fake_cupy.functions[0], "max_dynamic_shared_size_bytes", None) == asked


def test_more_shared_memory_than_the_gpu_has(fake_cupy):
    with pytest.raises(DeviceError, match=r"needs 232449 bytes .* H200 gives a CTA 232448"):
        modules.load("tiny", DEFINES, 0, smem_bytes=232448 - 1023)
    assert fake_cupy.modules == []


def test_a_refused_module_names_kernel_and_compiler(fake_cupy, monkeypatch):
    def refuse(path):
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    monkeypatch.setattr(fake_cupy, "RawModule", refuse)
    with pytest.raises(DeviceError, match="H200 refuses tiny .*sm_90a, NVRTC .*NO_BINARY_FOR_GPU"):
        modules.load("tiny", DEFINES, 0)


def test_a_cache_that_is_emptied_at_the_wrong_moment(fake_cupy, monkeypatch):
    """A clean-up job between storing and loading; the next call makes the file again."""
    build = modules.build

    def build_and_remove(*arguments):
        path = build(*arguments)
        path.unlink()
        return path
    with monkeypatch.context() as patch:
        patch.setattr(modules, "build", build_and_remove)
        with pytest.raises(DeviceError, match="tiny cannot be read back.*such file.*call again"):
            modules.load("tiny", DEFINES, 0)
    assert modules.load("tiny", DEFINES, 0).name == "tiny"


@pytest.mark.parametrize("capability, error", [
    ((7, 5), UnsupportedError), ((99, 0), CompileError)])
def test_gpus_that_cannot_be_served(fake_cupy, monkeypatch, capability, error):
    gpu = driver.Device(0, "other", capability, 1, 1, 99 * 1024)
    monkeypatch.setattr(driver, "device", lambda index: gpu)
    with pytest.raises(error, match="{}.{}".format(*capability)):
        modules.load("tiny", DEFINES, 0)


@pytest.mark.parametrize("version, extra", [(None, "cuda13"), ((12, 4), "cuda12"),
                                            ((13, 1), "cuda13")])
def test_without_cupy_the_extra_to_install_is_named(monkeypatch, version, extra):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(driver, "version", lambda: version)
    with pytest.raises(DeviceError, match=rf'pip install "dashcupy\[{extra}\]"'):
        modules.load("tiny", DEFINES, 0)


def test_cupy_that_cannot_make_its_cache_folder(tmp_path, monkeypatch):
    """CuPy's import fails with FileNotFoundError where the home cannot be written."""
    (tmp_path / "cupy.py").write_text("raise FileNotFoundError('/nowhere/.cupy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(DeviceError, match="/nowhere/.cupy.*CUPY_CACHE_DIR"):
        driver.require_cupy()


def test_without_a_driver_the_cause_is_named(monkeypatch):
    """CuPy itself says 'driver version is insufficient' there."""
    monkeypatch.setattr(driver, "library", lambda: None)
    driver.device.cache_clear()
    assert driver.version() is None
    for call in (driver.devices, lambda: driver.device(0), lambda: driver.occupancy(1, 32, 0)):
        with pytest.raises(DeviceError, match="no NVIDIA driver.*install the driver.*NumPy"):
            call()


def fake_driver(answers):
    """A driver library: each function takes its results from ``answers``, or fails with 100."""
    def call(name):
        def function(*arguments):
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"no CUDA-capable device is detected"
                return 0
            if name not in answers:
                return 100
            answers[name](*arguments)
            return 0
        return function
    return type("Driver", (), {"__getattr__": lambda self, name: call(name)})()


def test_what_the_driver_says_is_read_right(monkeypatch):
    attributes = {16: 132, 75: 9, 76: 0, 97: 232448}

    def set_to(value):
        return lambda pointer, *_: setattr(pointer._obj, "value", value)

    library = fake_driver({
        "cuInit": lambda flags: None,
        "cuDriverGetVersion": set_to(12040),
        "cuDeviceGetCount": set_to(1),
        "cuDeviceGet": set_to(0),
        "cuDeviceGetName": lambda buffer, size, handle: setattr(buffer, "value", b"H200"),
        "cuDeviceTotalMem_v2": set_to(140 << 30),
        "cuDeviceGetAttribute": lambda pointer, number, handle: setattr(
            pointer._obj, "value", attributes[number]),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": set_to(3)})
    monkeypatch.setattr(driver, "library", lambda: library)
    driver.device.cache_clear()
    try:
        assert driver.version() == (12, 4)
        assert driver.devices() == (H200,)
        assert driver.occupancy(1234, 128, 1024) == 3
    finally:
        driver.device.cache_clear()


def test_a_driver_without_gpu(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: fake_driver({}))
    assert driver.version() is None
    with pytest.raises(DeviceError, match="cuInit failed with error 100 .no CUDA-capable device"):
        driver.devices()


@pytest.mark.gpu
def test_a_kernel_runs_on_the_gpu():
    import cupy
    import numpy
    kernel = modules.load("tiny", DEFINES, 0, smem_bytes=64 * 1024)
    x = cupy.asarray(numpy.arange(256, dtype=numpy.float32))
    kernel.raw((1,), (256,), (x,), shared_mem=64 * 1024)
    assert numpy.array_equal(x.get(), numpy.arange(256, dtype=numpy.float32)[::-1] + 1)
    assert kernel.raw.num_regs == kernel.resources.regs
    assert kernel.raw.shared_size_bytes == kernel.resources.static_smem_bytes
    gpu = driver.device(0)
    assert kernel.arch == nvrtc.choose_arch(gpu.compute_capability, nvrtc.default_library())
    assert driver.occupancy(kernel.function, 256, 64 * 1024) == gpu.smem_bytes // (66 * 1024)
