"""Arrays of every framework: recognised without an import, on their stream, never mixed."""

import subprocess
import sys

import numpy as np
import pytest
from fake_frameworks import (
    TORCH_STREAM,
    FakeJaxArray,
    FakeTensor,
    FakeTracer,
    Foreign,
    install_jax,
    install_torch,
)
from fake_gpu import STREAM, FakeArray, fake_gpu

import dashcupy
from dashcupy import arrays, driver
from dashcupy.errors import DeviceError, InvalidInputError, UnsupportedError

SHAPE, LSE = (1, 200, 2, 64), (1, 2, 200)


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def pointers(launch, *names):
    """Addresses of arrays, whether the kernel is told them as such or in tensor maps."""
    fields = launch.fields
    return [fields[name] if name in fields else fields[f"{name}_map"].pointer for name in names]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_runs_on_its_own_stream_and_allocator(gpu, monkeypatch, dtype):
    """Another stream would race with what the caller has just enqueued."""
    install_torch(monkeypatch)
    q, k, v = (FakeTensor(SHAPE, dtype, device=1) for _ in range(3))
    out, lse = dashcupy.attention(q, k, v, return_lse=True)
    assert isinstance(out, FakeTensor) and out.dtype == f"torch.{dtype}"
    assert lse.dtype == "torch.float32" and out.get_device() == 1
    dashcupy.attention_backward(q, q, k, v, out, lse)
    assert {launch.stream for launch in gpu.launches} == {TORCH_STREAM + 1}
    assert {launch.device for launch in gpu.launches} == {1} and gpu.current == 0
    assert not gpu.allocated, "workspace from CuPy's pool is not ordered on torch's stream"
    assert pointers(gpu.launches[0], "q", "out") == [q.data_ptr(), out.data_ptr()]
    assert not arrays._held


def test_torch_results_that_require_a_gradient_are_refused(gpu, monkeypatch):
    """Autograd would not see that they were overwritten."""
    install_torch(monkeypatch)
    q, k, v, out = (FakeTensor(SHAPE) for _ in range(4))
    out.requires_grad = True
    with pytest.raises(InvalidInputError, match="requires a gradient"):
        dashcupy.attention(q, k, v, out=out)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_negated_torch_tensors_are_refused(gpu, monkeypatch, on_gpu):
    """torch.imag of a conjugate: the sign stands in a flag that no kernel, nor NumPy, sees."""
    install_torch(monkeypatch)
    q, k, v = (FakeTensor(SHAPE) for _ in range(3))
    for x in (q, k, v):
        x.is_cuda, x.device.type = on_gpu, "cuda" if on_gpu else "cpu"
    v.negative = True
    with pytest.raises(InvalidInputError, match=r"v is a torch .* give v.resolve_neg\(\)"):
        dashcupy.attention(q, k, v)


def test_torch_tensors_without_memory_are_refused(gpu, monkeypatch):
    """A fake tensor's pointer is null: the kernel would read address 0."""
    install_torch(monkeypatch)
    q, k, v = (FakeTensor(SHAPE) for _ in range(3))
    k._array.data.ptr = 0
    with pytest.raises(InvalidInputError, match="k is a torch tensor without memory"):
        dashcupy.attention(q, k, v)
    k.is_cuda, k.device.type = False, "meta"
    with pytest.raises(InvalidInputError, match="k is on device"):
        dashcupy.attention(q, k, v)


def test_jax_results_are_jax_arrays_in_jax_memory(gpu, monkeypatch):
    """CuPy's pool would take a result back while JAX's stream may still read it."""
    jax = install_jax(monkeypatch)
    q, k, v = (FakeJaxArray(SHAPE, "bfloat16") for _ in range(3))
    out, lse = dashcupy.attention(q, k, v, return_lse=True)
    assert isinstance(out, FakeJaxArray) and out.dtype == arrays.numpy_dtype("bfloat16")
    assert [made.array for made in jax.made] == [out.array, lse.array]
    assert pointers(gpu.launches[0], "q", "out", "lse") == [
        q.array.data.ptr, out.array.data.ptr, lse.array.data.ptr]
    # JAX must be told on which stream its arrays are read, to make it wait for the producer.
    assert q.streams == k.streams == v.streams == [STREAM]
    assert gpu.launches[0].stream == STREAM


def test_jax_leaves_another_gpu_current(gpu, monkeypatch):
    """XLA does where there are several: a kernel of this GPU is no handle in the other's context,
    and the caller's thread would go on there."""
    jax = install_jax(monkeypatch)
    empty, from_dlpack = jax.numpy.empty, jax.dlpack.from_dlpack

    def disturb(function):
        def disturbed(*arguments, **options):
            result = function(*arguments, **options)
            gpu.stack[-1:] = [1]  # cuCtxSetCurrent
            return result
        return disturbed

    jax.numpy.empty, jax.dlpack.from_dlpack = disturb(empty), disturb(from_dlpack)
    monkeypatch.setattr(FakeJaxArray, "__dlpack__", disturb(FakeJaxArray.__dlpack__))
    x = FakeJaxArray(SHAPE, "bfloat16")
    for _ in range(2):  # the second one finds the first one's launcher
        dashcupy.attention(x, x, x)
    assert [launch.device for launch in gpu.launches] == [0, 0] and gpu.stack == [0]


def test_jax_arrays_are_held_until_the_gpu_is_done(gpu, monkeypatch):
    """JAX reuses a dropped array on its own stream, while our kernels still wait for their turn."""
    install_jax(monkeypatch)
    x = FakeJaxArray(SHAPE)
    dashcupy.attention(x, x, x)
    assert len(arrays._held) == 1 and len(arrays._held[0][1]) == 6  # q, k, v, out, lse, nothing
    gpu.events[0].done = True
    dashcupy.attention(x, x, x)
    assert len(arrays._held) == 1 and arrays._held[0][0] is gpu.events[1]


@pytest.mark.parametrize("x, message", [
    (FakeTracer(SHAPE), "q is a JAX tracer.*outside jit, grad and vmap.*dashcupy.jax.attention"),
    (FakeJaxArray(SHAPE, devices=(0, 1)), r"q lies on \['gpu:0', 'gpu:1'\].*one CUDA GPU"),
    (FakeJaxArray(SHAPE, platform="tpu"), "q lies on .*tpu"),
])
def test_jax_arrays_without_one_memory_are_refused(gpu, monkeypatch, x, message):
    """Tracers and sharded arrays pass for arrays, and have no address."""
    install_jax(monkeypatch)
    for _ in range(2):  # also when the type has been seen before
        with pytest.raises(InvalidInputError, match=message):
            dashcupy.attention(x, x, x)


def test_jax_arrays_of_a_call_inside_a_trace(gpu, monkeypatch):
    """Memory for results would be a tracer, although the inputs are none."""
    monkeypatch.setattr(arrays, "_by_type", {})
    jax = install_jax(monkeypatch)
    x = FakeJaxArray(SHAPE)
    dashcupy.attention(x, x, x)
    jax.numpy.empty = lambda shape, dtype: FakeTracer(shape, dtype.name)
    with pytest.raises(InvalidInputError, match="while JAX traces.*dashcupy.jax.attention"):
        dashcupy.attention(x, x, x)


def test_jax_arrays_cannot_be_written(gpu, monkeypatch):
    """They are immutable: whoever holds another view would see the change."""
    install_jax(monkeypatch)
    x, out = FakeJaxArray(SHAPE), FakeJaxArray(SHAPE)
    with pytest.raises(InvalidInputError, match="JAX arrays cannot be written: leave out away"):
        dashcupy.attention(x, x, x, out=out)


def test_dlpack_arrays_are_ordered_and_held(gpu):
    """The producer is told our stream, and the memory stays until the kernels are done."""
    q, k, v = Foreign(SHAPE), Foreign(SHAPE, kind=13), Foreign(SHAPE)
    out = dashcupy.attention(q, k, v)
    assert isinstance(out, FakeArray) and q.streams == [STREAM] == [gpu.launches[0].stream]
    assert pointers(gpu.launches[0], "k") == [k.array.data.ptr] and len(arrays._held) == 1
    gpu.capturing = True
    with pytest.raises(UnsupportedError, match="graph cannot be captured from DLPack arrays"):
        dashcupy.attention(q, k, v, return_lse=True)


def test_dlpack_arrays_of_the_cpu_are_refused(gpu):
    """Their address means nothing to a kernel."""
    with pytest.raises(InvalidInputError, match=r"DLPack kind 1 .*numpy.from_dlpack\(q\)"):
        dashcupy.attention(Foreign(SHAPE, kind=1), Foreign(SHAPE, kind=1), Foreign(SHAPE, kind=1))


def test_dlpack_arrays_on_a_gpu_that_is_not_there(monkeypatch):
    """CuPy's own error is none of ours and does not say what is missing."""
    monkeypatch.setattr(driver, "library", lambda: None)
    driver.device.cache_clear()
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        dashcupy.attention(Foreign(SHAPE), Foreign(SHAPE), Foreign(SHAPE))


@pytest.mark.parametrize("x, message", [
    (Foreign, "q is a builtins.type, not an array"),
    ([[1.0]], "q is a builtins.list, not an array.*numpy.asarray"),
    (None, "q is a builtins.NoneType, not an array"),
    (np.float32(1), "q is a numpy.float32, not an array"),
    (np.ma.zeros(SHAPE), "q is a masked array"),
])
def test_what_is_no_array_is_refused(x, message):
    """Converting in silence would copy on every call, or lose the mask."""
    y = np.zeros(SHAPE, np.float32)
    with pytest.raises(InvalidInputError, match=message):
        dashcupy.attention(x, y, y)


def test_frameworks_are_not_mixed(gpu, monkeypatch):
    """Each has its own stream and allocator; there would be no answer to what comes back."""
    install_torch(monkeypatch)
    install_jax(monkeypatch)
    kinds = [np.zeros(SHAPE, np.float16), FakeArray(SHAPE), FakeTensor(SHAPE), FakeJaxArray(SHAPE),
             Foreign(SHAPE)]
    for q in kinds:
        for v in kinds:
            if q is v:
                continue
            with pytest.raises(InvalidInputError, match=f"q is a {type(q).__module__}.* and v a "
                                                        f"{type(v).__module__}.*one framework"):
                dashcupy.attention(q, q, v)
    out = np.zeros(SHAPE, np.float16)
    with pytest.raises(InvalidInputError, match="q is a .*FakeArray and out a numpy.ndarray"):
        dashcupy.attention(kinds[1], kinds[1], kinds[1], out=out)


def test_strides_between_elements_are_refused(gpu):
    """A view of packed records: rounding such strides reads the wrong bytes."""
    q, k, v = (FakeArray(SHAPE) for _ in range(3))
    k.strides = (25603, 256, 128, 2)
    with pytest.raises(InvalidInputError, match="k has strides of .* bytes"):
        dashcupy.attention(q, k, v)


def test_import_brings_in_no_framework():
    """A script that uses NumPy must not pay for CuPy, torch or JAX, nor need a GPU."""
    code = ("import sys, dashcupy; "
            "print([name for name in ('cupy', 'torch', 'jax') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def numpy_results(x, dtype):
    q, k, v, dout = (a.astype(dtype) for a in x)
    out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
    return out, lse, *dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_real_torch_on_the_cpu(dtype):
    """Tensors come back, with NumPy's bits; bfloat16 has no direct way into NumPy."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((4, 1, 70, 2, 16), dtype=np.float32)
    expected = numpy_results(x, arrays.numpy_dtype(dtype))
    q, k, v, dout = torch.from_numpy(x).to(getattr(torch, dtype))
    q = torch.nn.Parameter(q)
    out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True)
    for found, wanted in zip((out, lse, *grads), expected):
        assert type(found) is torch.Tensor and not found.requires_grad
        assert np.array_equal(found.float().numpy(), wanted.astype(np.float32))
    given = torch.empty_like(v)
    assert dashcupy.attention(q, k, v, causal=True, out=given) is given
    assert torch.equal(given, out)
    with pytest.raises(InvalidInputError, match="without memory"):
        dashcupy.attention(k.to_sparse(), k, v)
    with pytest.raises(InvalidInputError, match="resolve_neg"):
        dashcupy.attention(torch._neg_view(k), k, v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_real_jax_on_the_cpu(dtype):
    """JAX arrays come back, with NumPy's bits; under jit there is nothing to compute with."""
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(0).standard_normal((4, 1, 70, 2, 16), dtype=np.float32)
    x = x.astype(arrays.numpy_dtype(dtype))
    q, k, v, dout = (jax.device_put(a, jax.devices("cpu")[0]) for a in x)
    out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True)
    for found, wanted in zip((out, lse, *grads), numpy_results(x, x.dtype)):
        assert isinstance(found, jax.Array)
        assert np.array_equal(np.asarray(found).astype(np.float32), wanted.astype(np.float32))
    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda a: f(a).sum())):
        with pytest.raises(InvalidInputError, match="JAX tracer"):
            transform(lambda a: dashcupy.attention(a, a, a))(q)
    with pytest.raises(InvalidInputError, match="while JAX traces.*dashcupy.jax.attention"):
        jax.jit(lambda a: a + dashcupy.attention(q, k, v))(q)
