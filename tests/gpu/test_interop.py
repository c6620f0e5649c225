"""Arrays of every framework, streams, threads, preallocated results, and calls that are refused."""

import threading

import dashcupy
import numpy as np
import pytest
from dashcupy import env

from . import kernels
from .support import (
    DEVICE,
    NAMES,
    PROCESS_LIMIT_S,
    Case,
    backward,
    digest,
    expect_right,
    expect_same_bits,
    expect_same_bits_on_gpu_1,
    from_cupy,
    in_new_process,
    jax_on_the_gpu,
    limit,
    run,
    to_jax,
    torch,
    two_gpus,
    wait_for_jax,
)

pytestmark = pytest.mark.gpu

CASE = Case(200, 333, "causal", batch=2, n_q_head=4, n_kv_head=2)
HALF = Case(200, 333, "full", dtype="float16", batch=2, n_q_head=4, n_kv_head=2)
_SLOW = 200_000_000  # cycles: some 100 ms, far longer than a call


class ByDlpack:
    """A library that dashcupy knows nothing of."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def _to_numpy(x):
    x = x.cpu()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _from_numpy(x):
    if x.dtype.name != "bfloat16":
        return torch.from_numpy(x).to(DEVICE)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)


def _results(case, inputs, wrap=lambda x: x):
    """Forward and backward of arrays of any framework; ``wrap`` is put around out and lse."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    causal = case.mask == "causal"
    out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, wrap(out), wrap(lse), causal=causal)
    return dict(zip(NAMES, (out, lse, *grads)))


@pytest.mark.parametrize("case", [CASE, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("framework", ["cupy", "dlpack"])
def test_cupy_and_dlpack(framework, case):
    # bfloat16 that is refused or read as another 2-byte type; results of the wrong library.
    cupy = pytest.importorskip("cupy")
    inputs = case.draw()
    if framework == "cupy":
        results = _results(case, {name: cupy.from_dlpack(x) for name, x in inputs.items()})
    else:
        results = _results(case, {name: ByDlpack(x) for name, x in inputs.items()}, ByDlpack)
    assert all(isinstance(x, cupy.ndarray) for x in results.values())
    assert results["out"].dtype.name == results["dk"].dtype.name == case.dtype
    expect_same_bits({name: from_cupy(x) for name, x in results.items()}, run(case, inputs),
                     framework)


@two_gpus
def test_cases_are_drawn_on_gpu_0():
    # JAX tests on two GPUs: whatever starts XLA makes another GPU the current one.
    with torch.cuda.device(1):
        inputs = CASE.draw()
    assert {x.get_device() for x in inputs.values()} == {0}
    expect_same_bits(inputs, CASE.draw(), "GPU 1 was the current one")


@two_gpus
def test_jax_on_the_second_gpu():
    # Memory for results that JAX makes on GPU 0 and moves: it came after the kernels had written.
    jax = jax_on_the_gpu()
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    for _ in range(3):
        results = _results(CASE, {name: jax.device_put(to_jax(x), jax.devices()[1])
                                  for name, x in inputs.items()})
        assert all(x.devices() == {jax.devices()[1]} for x in results.values())
        wait_for_jax(list(results.values()))
        expect_same_bits({name: torch.from_dlpack(x).to(DEVICE) for name, x in results.items()},
                         expected, "jax on GPU 1")


@pytest.mark.parametrize("case", [CASE, HALF], ids=["bfloat16", "float16"])
def test_jax(case):
    jax = jax_on_the_gpu()
    inputs = case.draw()
    results = _results(case, {name: to_jax(x) for name, x in inputs.items()})
    assert all(isinstance(x, jax.Array) for x in results.values())
    assert str(results["dq"].dtype) == case.dtype and str(results["lse"].dtype) == "float32"
    wait_for_jax(list(results.values()))
    expect_same_bits({name: torch.from_dlpack(x) for name, x in results.items()},
                     run(case, inputs), "jax")


def test_numpy_is_computed_on_the_cpu():
    case = Case(65, 70, "causal", n_kv_head=1)
    inputs = case.draw()
    results = _results(case, {name: _to_numpy(x) for name, x in inputs.items()})
    assert all(isinstance(x, np.ndarray) for x in results.values())
    assert results["dv"].dtype.name == "bfloat16"
    expect_right(case, inputs, {name: _from_numpy(x) for name, x in results.items()})


def test_torch_results():
    # Results that autograd would follow, or that are on another device; a Parameter is a tensor.
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    inputs["q"].requires_grad_()
    inputs["k"] = torch.nn.Parameter(inputs["k"])
    got = run(CASE, inputs)
    for name, x in got.items():
        assert type(x) is torch.Tensor and not x.requires_grad and x.is_contiguous(), name
        assert x.device == inputs["v"].device
    expect_same_bits(got, expected, "inputs that require a gradient")


def test_stream_of_torch():
    # Kernels on the default stream, which does not wait for the stream that fills the inputs.
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    late = {name: torch.full_like(x, float("nan")) for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        warm = [x.clone() for x in run(CASE, inputs).values()]  # memory for what follows: an
        del warm  # allocation may wait for the GPU
        torch.cuda._sleep(_SLOW)
        for name, x in late.items():
            x.copy_(inputs[name])
        got = run(CASE, late)
        copies = {name: x.clone() for name, x in got.items()}
    assert not stream.query(), "the producer was too quick: nothing was tested"
    stream.synchronize()
    expect_same_bits(copies, expected, "torch stream")


def test_stream_of_cupy():
    cupy = pytest.importorskip("cupy")
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    kernels.spin(1, 1, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = {name: cupy.empty(tuple(x.shape), _to_numpy(x[:1, :1]).dtype)
                for name, x in inputs.items()}
    for x in late.values():
        x.data.memset(0xFF, x.nbytes)
    torch.cuda.synchronize()
    with stream:
        _results(CASE, late)  # fills CuPy's pool: an allocation may wait for the GPU
        kernels.spin(1, _SLOW, stream.ptr)
        for name, x in late.items():
            x.data.copy_from_device_async(cupy.from_dlpack(inputs[name]).data, x.nbytes, stream)
        results = _results(CASE, late)
        assert not stream.done, "the producer was too quick: nothing was tested"
    stream.synchronize()
    expect_same_bits({name: from_cupy(x) for name, x in results.items()}, expected, "CuPy stream")


def test_stream_of_a_dlpack_producer():
    # The producer's stream is not ours: it must be asked to let ours wait.
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    late = {name: torch.full_like(x, float("nan")) for name, x in inputs.items()}
    _results(CASE, {name: ByDlpack(x) for name, x in late.items()}, ByDlpack)  # fills the pool
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLOW)
        for name, x in late.items():
            x.copy_(inputs[name])
        results = _results(CASE, {name: ByDlpack(x) for name, x in late.items()}, ByDlpack)
        assert not stream.query(), "the producer was too quick: nothing was tested"
    torch.cuda.synchronize()
    expect_same_bits({name: from_cupy(x) for name, x in results.items()}, expected, "DLPack")


def test_jax_arrays_that_are_still_computed_or_already_dropped():
    # JAX runs on streams of its own: kernels must wait for its arrays, and keep them.
    jax = jax_on_the_gpu()
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    given = {name: to_jax(x) for name, x in inputs.items()}
    ones = jax.numpy.ones(1 << 24, "float32")

    @jax.jit
    def slow(x, a):
        a = jax.lax.fori_loop(0, 400, lambda i, a: a * 0.5, a)  # some 10 ms, and 0 at the end
        return x + a[0].astype(x.dtype)

    fill = jax.jit(lambda x: jax.numpy.full_like(x, float("nan")))
    warm = [slow(x, ones) for x in given.values()], [fill(x) for x in given.values()]
    wait_for_jax(warm)
    kernels.spin(1, _SLOW, 0)  # our stream is late as well
    results = _results(CASE, {name: slow(x, ones) for name, x in given.items()})
    litter = [fill(x) for x in given.values() for _ in range(4)]  # into memory that is free now
    wait_for_jax([litter, list(results.values())])
    expect_same_bits({name: torch.from_dlpack(x) for name, x in results.items()}, expected,
                     "late and dropped")


def test_another_thread():
    # A thread that has not used the GPU yet has no context of the driver.
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    torch.cuda.synchronize()
    found = []
    thread = threading.Thread(target=lambda: found.append(run(CASE, inputs)))
    thread.start()
    thread.join(60)
    torch.cuda.synchronize()
    assert found, "the thread raised"
    expect_same_bits(found[0], expected, "thread")


def test_new_lengths_in_another_thread():
    # The kernels are loaded, so nothing of the first call in this thread made a context current.
    inputs = CASE.draw()
    run(CASE, inputs)
    case = CASE.replace(q_len=210, kv_len=345)
    inputs = case.draw()
    torch.cuda.synchronize()
    found = []
    # The backward first: torch would make a context for what the forward allocates.
    out, lse = (torch.zeros_like(inputs["q"]), torch.zeros(2, 4, 210, device=DEVICE))
    grads = tuple(torch.empty_like(inputs[name]) for name in "qkv")
    q, k, v = (inputs[name] for name in "qkv")
    n_bytes = dashcupy.attention_plan(q, k, v, causal=True).workspace_bytes
    workspace = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()

    def work():
        backward(case, inputs, out, lse, grads=grads, workspace=workspace)
        found.append(run(case, inputs))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    torch.cuda.synchronize()
    assert found, "the thread raised"
    expect_same_bits(found[0], run(case, inputs), "new lengths in a thread")


def test_preallocated_results():
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    into = {name: torch.full_like(x, float("nan")) for name, x in expected.items()}
    q, k, v = (inputs[name] for name in "qkv")
    assert dashcupy.attention(q, k, v, causal=True, out=into["out"]) is into["out"]
    into["out"].fill_(float("nan"))
    out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True,
                                  out=(into["out"], into["lse"]))
    dq, dk, dv = backward(CASE, inputs, out, lse, grads=(into["dq"], None, into["dv"]))
    assert out is into["out"] and lse is into["lse"] and dq is into["dq"] and dv is into["dv"]
    expect_same_bits(into | {"dk": dk}, expected, "preallocated")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (lambda q, k, v: (q, k.cpu(), v.cpu()), dashcupy.InvalidInputError, "CPU"),
    (lambda q, k, v: (q, _to_numpy(k), v), dashcupy.InvalidInputError, "one framework"),
    (lambda q, k, v: (q, k.half(), v), dashcupy.InvalidInputError, "float16"),
    (lambda q, k, v: (q.float(), k.float(), v.float()), dashcupy.UnsupportedError, "float32"),
    (lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60]), dashcupy.UnsupportedError, "60"),
    (lambda q, k, v: (q.mT.contiguous().mT, k, v), dashcupy.InvalidInputError, "contiguous"),
    (lambda q, k, v: (q[:, :, :3], k, v), dashcupy.InvalidInputError, "multiple"),
    (lambda q, k, v: (q, k, v[:, :-1]), dashcupy.InvalidInputError, "shape")],
    ids=["devices", "frameworks", "dtypes", "float32", "head_dim", "rows", "heads", "lengths"])
def test_refused_and_then_right(arguments, error, message):
    # A refusal that leaves the GPU, a stream or a cache in a state that spoils the next call.
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    with pytest.raises(error, match=message):
        dashcupy.attention(*arguments(*(inputs[name] for name in "qkv")), causal=True)
    expect_same_bits(run(CASE, inputs), expected, "after a refusal")


@two_gpus
def test_second_gpu():
    inputs = CASE.draw()
    there = expect_same_bits_on_gpu_1(lambda x: run(CASE, x), inputs)
    with pytest.raises(dashcupy.InvalidInputError, match="one device"):
        run(CASE, there | {"k": inputs["k"]})


@pytest.mark.skipif(env.debug(), reason="debug builds wait for the GPU, which no graph allows")
def test_cuda_graph_of_cupy():
    # Memory that goes back to CuPy's pool after the capture, and is written by the next replay.
    cupy = pytest.importorskip("cupy")
    inputs = CASE.draw()
    expected = run(CASE, inputs)
    given = {name: cupy.from_dlpack(x) for name, x in inputs.items()}
    into = {name: torch.zeros_like(x) for name, x in expected.items()}
    views = {name: cupy.from_dlpack(x) for name, x in into.items()}
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    n_bytes = dashcupy.attention_plan(q, k, v, causal=True).workspace_bytes
    workspace = cupy.empty(n_bytes, "uint8")
    torch.cuda.synchronize()

    def work(**options):
        dashcupy.attention(q, k, v, causal=True, return_lse=True,
                           out=(views["out"], views["lse"]))
        dashcupy.attention_backward(dout, q, k, v, views["out"], views["lse"], causal=True,
                                    grads=(views["dq"], views["dk"], views["dv"]), **options)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work()  # all kernels are loaded before the capture
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(dashcupy.UnsupportedError, match="workspace"):
                work()
            work(workspace=workspace)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream=stream)
        stream.synchronize()
    for x in into.values():
        x.fill_(float("nan"))
    torch.cuda.synchronize()
    graph.launch(stream=stream)
    stream.synchronize()
    expect_same_bits(into, expected, "replay")


@limit(PROCESS_LIMIT_S + 20)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_debug_build(mask):
    # Bounded waits that give up too early, or change the order.
    case = Case(1400, 1400, mask, batch=2, n_kv_head=1)
    inputs = case.draw()
    code = ("from gpu.support import Case, digest, run\n"
            f"case = {case!r}\nprint(digest(run(case, case.draw())))\n")
    assert in_new_process(code, DASHCUPY_DEBUG="1").strip() == digest(run(case, inputs))
