"""dashcupy.jax on JAX's CPU backend: NumPy's bits in every transformation, clear refusals."""

import contextlib
import doctest
import functools
import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeArray, fake_gpu

import dashcupy
from dashcupy import arrays, call
from dashcupy.errors import InvalidInputError, UnsupportedError

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy
dashcupy_jax = importlib.import_module("dashcupy.jax")
attention = dashcupy_jax.attention

Q, K = (2, 37, 6, 24), (2, 53, 3, 24)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def draw(dtype="float32", q=Q, k=K):
    """q, k, v, dout."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(arrays.numpy_dtype(dtype)))
            for shape in (q, k, k, q)]


def plain(q, k, v, dout, schedule="auto", **options):
    """out, lse, dq, dk, dv of the plain functions on NumPy arrays."""
    q, k, v, dout = map(np.asarray, (q, k, v, dout))
    out, lse = dashcupy.attention(q, k, v, return_lse=True, **options)
    return out, lse, *dashcupy.attention_backward(dout, q, k, v, out, lse, schedule=schedule,
                                                  **options)


def with_gradients(q, k, v, dout, **options):
    """out, lse, dq, dk, dv of the layer."""
    (out, lse), pull = jax.vjp(
        lambda *qkv: (lambda out, lse: (out, jax.lax.stop_gradient(lse)))(
            *attention(*qkv, return_lse=True, **options)), q, k, v)
    return out, lse, *pull((dout, jnp.zeros_like(lse)))


def gradients(function=attention, **options):
    """A function of q, k, v, dout: gradients of sum(out * dout)."""
    def loss(q, k, v, dout):
        return (function(q, k, v, **options) * dout).sum()
    return jax.grad(loss, argnums=(0, 1, 2))


def bits(results):
    return [(x.shape, x.dtype.name, np.asarray(x).tobytes()) for x in jax.tree.leaves(results)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True, "schedule": "shortest_first"}, {"causal": "top_left", "scale": 0.3}])
def test_bits_are_those_of_the_plain_functions(dtype, options):
    """Another order of a sum inside jit, a mask or scale that is lost on the way."""
    with jax.enable_x64(dtype == "float64"):
        x = draw(dtype)
        expected = bits(plain(*x, **options))
        assert bits(with_gradients(*x, **options)) == expected
        assert bits(jax.jit(lambda *x: with_gradients(*x, **options))(*x)) == expected
        again = jax.checkpoint(lambda *qkv: attention(*qkv, **options))
        assert bits(jax.jit(gradients(again))(*x)) == expected[2:]


def test_gradients_are_those_of_autodiff():
    """A cotangent that goes to the wrong argument, or is not scaled."""
    def naive(q, k, v, scale):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        s = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
        hidden = jnp.arange(53) > jnp.arange(37)[:, None] + 53 - 37
        p = jax.nn.softmax(jnp.where(hidden, -jnp.inf, s), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    with jax.enable_x64(True):
        x = draw("float64")
        found = jax.jit(gradients(causal=True, scale=0.7))(*x)
        for a, b in zip(found, gradients(naive, scale=0.7)(*x)):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        value, dk = jax.value_and_grad(lambda k: (attention(x[0], k, x[2]) ** 2).sum())(x[1])
        assert value > 0 and dk.shape == K


def test_static_arguments_of_a_jitted_function():
    """A program that is compiled once and used for another mask, scale or shape."""
    compiled = jax.jit(attention, static_argnames=("causal", "scale", "schedule", "return_lse"))
    for q, k in ((Q, K), ((1, 5, 2, 8), (1, 3, 1, 8))):
        x = draw(q=q, k=k)
        for options in ({}, {"causal": True}, {"causal": "top_left"}, {"scale": 0.5},
                        {"scale": np.float32(0.25)}, {"schedule": "ascending"}):
            wanted = plain(*x, **options)[:2]
            assert bits(compiled(*x[:3], **options)) == bits(wanted[:1])
            assert bits(compiled(*x[:3], return_lse=True, **options)) == bits(wanted)


def test_vmap_is_one_call_with_a_larger_batch(monkeypatch):
    """One launch for each mapped element, or a batch and a mapped axis that are mixed up."""
    q, k, v, dout = draw()
    qs, ks = jnp.stack([q, 2 * q, 3 * q], axis=1), jnp.stack([k, -k, 2 * k])
    expected = [plain(qs[:, i], ks[i], v, dout, causal=True) for i in range(3)]
    calls = []
    run = call.run
    monkeypatch.setattr(call, "run", lambda *args, **options: calls.append(args[1][0].shape) or
                        run(*args, **options))
    mapped = jax.vmap(lambda q, k, v: attention(q, k, v, causal=True), (1, 0, None))
    for function in (mapped, jax.jit(mapped)):
        assert bits(function(qs, ks, v)) == bits(jnp.stack([x[0] for x in expected]))
    assert calls == [(6, *Q[1:])] * 2
    each = jax.vmap(gradients(causal=True), (1, 0, None, None))(qs, ks, v, dout)
    assert bits(each) == bits([jnp.stack([x[i] for x in expected]) for i in (2, 3, 4)])
    dv = gradients(mapped)(qs, ks, v, jnp.stack([dout] * 3))[2]
    np.testing.assert_allclose(dv, sum(x[4] for x in expected), rtol=1e-5, atol=1e-5)
    nested = jax.vmap(jax.vmap(attention, (None, 0, None)), (1, None, None))(qs, ks, v)
    assert bits(nested[2, 1]) == bits(plain(qs[:, 2], ks[1], v, dout)[0])


def test_loops():
    """Scan and map compile the callback once and call it with new buffers each time."""
    q, k, v, _ = draw()
    ks = jnp.stack([k, -k, 2 * k])
    step = q
    for one in ks:
        step = attention(step, one, v)
    scanned = jax.jit(lambda q: jax.lax.scan(
        lambda carry, k: (attention(carry, k, v), None), q, ks)[0])
    assert bits(scanned(q)) == bits(step)
    mapped = jax.lax.map(lambda k: attention(q, k, v), ks)
    assert bits(mapped) == bits(jnp.stack([attention(q, one, v) for one in ks]))
    unrolled = jax.grad(lambda q: attention(attention(attention(
        q, ks[0], v), ks[1], v), ks[2], v).sum())(q)
    assert bits(jax.jit(jax.grad(lambda q: scanned(q).sum()))(q)) == bits(unrolled)


@pytest.mark.parametrize("q, k", [
    ((2, 0, 6, 24), K), (Q, (2, 0, 3, 24)), ((0, *Q[1:]), (0, *K[1:])), ((2, 37, 0, 24), K)])
def test_empty_inputs_give_zeros(q, k):
    """XLA leaves out what has no elements, and its buffers have no address."""
    x = draw(q=q, k=k)
    assert bits(jax.jit(with_gradients)(*x)) == bits(plain(*x))


def test_nan_reaches_its_row():
    """A callback must not raise for values, nor hide them."""
    q, k, v, dout = draw()
    q = q.at[1, 3, 2, 0].set(jnp.nan)
    out, *_, dk, _ = jax.jit(with_gradients)(q, k, v, dout)
    assert np.isnan(out[1, 3, 2]).all() and np.isnan(out).sum() == Q[-1]
    assert np.isnan(dk[1, :, 1]).all() and not np.isnan(dk[0]).any()


def test_donated_inputs():
    """XLA may put a result where an input was, which is still read."""
    x = draw()
    donating = jax.jit(lambda q, k, v: attention(q, k, v) + q, donate_argnums=0)
    expected = np.asarray(attention(*x[:3]) + x[0])
    assert bits(donating(x[0].copy(), *x[1:3])) == bits(expected)


def test_threads():
    """Callbacks of several programs at the same time."""
    x = draw()
    expected = bits(plain(*x)[2:])
    compiled, found = jax.jit(gradients()), []

    def work():
        with jax.default_device(jax.devices("cpu")[0]):
            for _ in range(5):
                found.extend((bits(compiled(*x)), bits(gradients()(*x))))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 20


@pytest.mark.parametrize("change, message", [
    ({"q": lambda a: a[0]}, r"q has shape \(37, 6, 24\), expected \[batch"),
    ({"k": lambda a: a.astype("bfloat16")}, "k has dtype bfloat16, expected float32"),
    ({"q": lambda a: a.astype("int32")}, "q has dtype int32"),
    ({"v": lambda a: a[:, 1:]}, "v has shape"),
    ({"v": lambda a: np.zeros(K)}, r"v is a numpy.ndarray, not a JAX array: .*asarray\(v\)"),
    ({"causal": "upper"}, "causal='upper' is not known"),
    ({"causal": jnp.ones}, "causal=.* is not known"),
    ({"scale": -1.0}, "scale=-1.0"),
    ({"scale": lambda a: a}, "scale is a function"),
    ({"schedule": "shft"}, "did you mean 'shift'"),
    ({"schedule": ["shift"]}, "is not known"),
    ({"schedule": "symmetric_shift"}, "not defined for the full mask")])
def test_wrong_arguments(change, message):
    """Refused when traced, by our errors; at run time they would be XLA's."""
    x = dict(zip("qkv", draw()))
    static = {name: value for name, value in change.items() if name not in x}

    def function(x):
        x = {name: change[name](a) if name in change else a for name, a in x.items()}
        return attention(**x, **static)

    for transform in (lambda f: f, jax.jit):
        with pytest.raises(InvalidInputError, match=message):
            transform(function)(x)


def test_traced_options_are_refused():
    """The kernels are chosen by them before a value is there."""
    q, k, v, _ = draw()
    for name in ("scale", "causal"):
        with pytest.raises(InvalidInputError, match=name):
            jax.jit(lambda value, name=name: attention(q, k, v, **{name: value}))(0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_through_lse(causal):
    """Its part left out, or taken for another; where lse is not used, it must cost nothing."""
    q, k, v, dout = draw()
    dlse = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 37)).astype("float32"))

    def loss(q, k, v, of_out, of_lse):
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        return (of_out(out) * dout).sum() + (of_lse(lse) * dlse).sum()

    def keep(x):
        return x

    stop = jax.lax.stop_gradient
    for of_out, of_lse in ((keep, keep), (stop, keep), (keep, stop), (stop, stop)):
        out, lse, *_ = plain(q, k, v, dout, causal=causal)
        expected = dashcupy.attention_backward(
            np.asarray(dout) * (of_out is keep), *map(np.asarray, (q, k, v)), out, lse,
            causal=causal, dlse=np.asarray(dlse) if of_lse is keep else None)
        for transform in (keep, jax.jit, jax.checkpoint):
            found = jax.grad(transform(functools.partial(loss, of_out=of_out, of_lse=of_lse)),
                             argnums=(0, 1, 2))(q, k, v)
            assert bits(found) == bits(expected)
        mapped = jax.vmap(jax.grad(functools.partial(loss, of_out=of_out, of_lse=of_lse)),
                          (0, None, None))(jnp.stack([q, q]), k, v)
        assert bits(mapped[1]) == bits(expected[0])


def test_an_lse_that_is_not_used_is_not_looked_at(monkeypatch):
    seen = []
    run = call.run
    monkeypatch.setattr(call, "run", lambda direction, inputs, given, **options: seen.append(
        inputs[-1] is None) or run(direction, inputs, given, **options))
    for transform in (lambda f: f, jax.jit):
        transform(gradients())(*draw())
    assert seen == [False, True] * 2  # forward, whose last input is v, and backward


def test_other_derivatives_are_refused():
    """JAX would ask for rules of a callback that users have never heard of."""
    q, k, v, _ = draw()

    def loss(q):
        return (attention(q, k, v) ** 2).sum()

    for second in (jax.grad(lambda q: jax.grad(loss)(q).sum()), jax.hessian(loss)):
        for transform in (lambda f: f, jax.jit):
            with pytest.raises(UnsupportedError, match="first derivative in reverse mode only"):
                transform(second)(q)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(loss, (q,), (q,))


def test_several_devices():
    """Under shard_map each device computes its part; a jit of sharded arrays gives equal bits."""
    code = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dashcupy.jax import attention
mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
q, k, v, dout = jax.random.normal(jax.random.key(0), (4, 4, 37, 2, 16))
def gradients(f):
    return jax.grad(lambda q, k, v: (f(q, k, v) * dout).sum(), argnums=(0, 1, 2))
expected = gradients(attention)(q, k, v)
part = P("batch")
mapped = jax.shard_map(attention, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
sharded = [jax.device_put(x, NamedSharding(mesh, part)) for x in (q, k, v)]
for f in (mapped, attention):
    for found, wanted in zip(jax.jit(gradients(f))(*sharded), expected):
        assert len(found.devices()) == 2
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                                "JAX_PLATFORMS": "cpu",
                                "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


class Buffer:
    """One of XLA's buffers on a fake GPU."""

    def __init__(self, shape, dtype="bfloat16"):
        self.array = Foldable(shape, dtype, device=1)

    def __dlpack_device__(self):
        return 2, self.array.data.device_id

    def __dlpack__(self, stream):
        return self.array


class Foldable(FakeArray):
    """A fake CuPy array with what `_fold` asks for."""

    @property
    def ndim(self):
        return len(self.shape)

    def reshape(self, *shape):
        return Foldable(shape, self.dtype.name, self.data.device_id, pointer=self.data.ptr)


@pytest.mark.parametrize("direction, with_dlse, kernels", [
    ("forward", False, ["fwd_sm90"]),
    *[("backward", with_dlse, ["bwd_preprocess", "bwd_sm90_d64", "bwd_postprocess"])
      for with_dlse in (False, True)]])
def test_on_a_gpu_the_callback_enqueues_on_the_stream_of_xla(monkeypatch, direction, with_dlse,
                                                             kernels):
    """Another stream or device would race with XLA's kernels; a copy would be lost."""
    q, k, lse = (3, 2, 200, 4, 64), (3, 2, 300, 2, 64), (3, 2, 4, 200)
    dlse = lse if with_dlse else None
    shapes = {"forward": ((q, k, k), (q, lse)), "backward": ((q, k, k, q, q, lse, dlse), (q, k, k))}
    inputs, results = ([shape and Buffer(shape, "float32" if shape == lse else "bfloat16")
                        for shape in group] for group in shapes[direction])
    with fake_gpu(monkeypatch) as gpu:
        cuda = gpu.cupy.cuda

        @contextlib.contextmanager
        def stream(foreign):
            version, handle = foreign.__cuda_stream__()
            before, cuda.get_current_stream = cuda.get_current_stream, (
                lambda device: SimpleNamespace(ptr=handle))
            assert version == 0
            yield
            cuda.get_current_stream = before

        cuda.Stream = SimpleNamespace(from_external=stream)
        gpu.contexts.clear()
        callback = dashcupy_jax._Callback(direction, dashcupy_jax._Options(True, None, "auto"))
        assert callback(SimpleNamespace(stream=0x77), tuple(results), *inputs) is None
        assert [launch.kernel for launch in gpu.launches] == kernels
        assert {(launch.stream, launch.device) for launch in gpu.launches} == {(0x77, 1)}
        fields = gpu.launches[-1].fields
        assert fields["batch"] == 6 and fields["q_len"] == 200
        for name, buffer in zip(call.RESULTS[direction], results):
            address = fields[name] if name in fields else fields[f"{name}_map"].pointer
            assert address == buffer.array.data.ptr
        if direction == "backward":
            assert fields["dlse"] == (inputs[-1].array.data.ptr if with_dlse else 0)
        assert gpu.current == 0 and gpu.contexts == {1} and not arrays._held


def test_equal_callbacks_share_a_program():
    """Each call of a vmapped function would compile again, and keep the program for good."""
    options = dashcupy_jax._Options(True, None, "auto")
    one, other = (dashcupy_jax._Callback("forward", options) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != dashcupy_jax._Callback("backward", options)


def test_jax_without_buffer_callback(monkeypatch):
    """It is experimental: a JAX without it must not fail with a name of its own."""
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    monkeypatch.delitem(sys.modules, "dashcupy.jax")
    with pytest.raises(ImportError, match="needs jax.experimental.buffer_callback.*install"):
        importlib.import_module("dashcupy.jax")


def test_examples_in_the_docstring():
    """An example that does not run is worse than none."""
    done = doctest.testmod(dashcupy_jax)
    assert done.failed == 0 and done.attempted > 3
