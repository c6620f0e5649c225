"""dashcupy.jax on a GPU: XLA's buffers and streams, the bits of eager calls, memory, errors."""

import threading

import dashcupy
import pytest

from .support import (
    Case,
    backward,
    expect_same_bits,
    from_cupy,
    jax_on_the_gpu,
    limit,
    run,
    to_jax,
    torch,
    wait_for_jax,
)

pytestmark = pytest.mark.gpu

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

CASES = [Case(200, 333, "causal", batch=2, n_q_head=4, n_kv_head=2),
         Case(513, 513, "full", head_dim=128, dtype="float16", n_q_head=4),
         Case(700, 700, "causal", head_dim=128, batch=2, schedule="symmetric_shift")]
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def needs_jax_on_the_gpu():
    jax_on_the_gpu()


def _to_jax(inputs):
    return [to_jax(inputs[name]) for name in ("q", "k", "v", "dout")]


def _to_torch(results):
    return {name: torch.from_dlpack(x) for name, x in zip(NAMES, wait_for_jax(results))}


def _with_gradients(case, wrap=lambda f: f):
    """A function of q, k, v, dout that gives out, dq, dk, dv."""
    from dashcupy.jax import attention

    def function(q, k, v, dout):
        out, pull = jax.vjp(wrap(lambda q, k, v: attention(
            q, k, v, causal=case.mask == "causal", schedule=case.schedule)), q, k, v)
        return out, *pull(dout)
    return function


def _expected(case, inputs):
    results = run(case, inputs)
    return {name: results[name] for name in NAMES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_torch_and_cupy(case):
    # Another kernel or order under jit; a buffer of XLA that is read as another dtype or layout.
    cupy = pytest.importorskip("cupy")
    inputs = case.draw()
    expected = _expected(case, inputs)
    q, k, v, dout = (cupy.from_dlpack(inputs[name]) for name in ("q", "k", "v", "dout"))
    causal = case.mask == "causal"
    out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=causal,
                                        schedule=case.schedule)
    expect_same_bits({name: from_cupy(x) for name, x in zip(NAMES, (out, *grads))}, expected,
                     "CuPy")
    x = _to_jax(inputs)
    for what, function in (("eager", _with_gradients(case)),
                           ("jit", jax.jit(_with_gradients(case))),
                           ("checkpoint", jax.jit(_with_gradients(case, jax.checkpoint)))):
        expect_same_bits(_to_torch(function(*x)), expected, what)


def test_gradient_through_lse():
    # A buffer that is taken for another, or is not there, in the list that XLA hands over.
    from dashcupy.jax import attention
    case = CASES[0]
    inputs = case.draw()
    results = run(case, inputs)
    names, x = NAMES[1:], _to_jax(inputs)
    dlse = torch.randn_like(results["lse"])

    def gradients(q, k, v, *cotangents):
        _, pull = jax.vjp(lambda *x: attention(*x, causal=True, return_lse=True), q, k, v)
        return pull(cotangents)

    for function in (gradients, jax.jit(gradients)):
        for given in (dlse, torch.zeros_like(dlse)):
            expected = backward(case, inputs, results["out"], results["lse"], dlse=given)
            found = wait_for_jax(function(*x, to_jax(given)))
            expect_same_bits(dict(zip(names, map(torch.from_dlpack, found))),
                             dict(zip(names, expected)), "lse")


def test_vmap():
    # Mapped elements become the batch of one launch.
    case = CASES[0].replace(batch=6)
    inputs = case.draw()
    mapped = jax.jit(jax.vmap(_with_gradients(case)))
    found = mapped(*(x.reshape(3, 2, *x.shape[1:]) for x in _to_jax(inputs)))
    expect_same_bits(_to_torch([x.reshape(6, *x.shape[2:]) for x in found]),
                     _expected(case, inputs), "vmap")


def test_kernels_run_in_the_order_of_the_program():
    # On another stream than XLA's they would read inputs that are still computed, and what comes
    # after would read results that are not there yet.
    case = CASES[0]
    inputs = case.draw()
    ones = jnp.ones(1 << 24, "float32")

    @jax.jit
    def late(x, ones):
        # Some 10 ms, and 0 at the end.
        slow = jax.lax.fori_loop(0, 400, lambda i, a: a * 0.5, ones)[0]
        results = _with_gradients(case)(*(a + slow.astype(a.dtype) for a in x))
        return [a * 1 for a in results], [jnp.full_like(a, jnp.nan) for a in x]

    for _ in range(3):
        expect_same_bits(_to_torch(late(_to_jax(inputs), ones)[0]), _expected(case, inputs),
                         "late")


def test_many_steps_and_threads():
    # Buffers of XLA that are used again at once; two programs at the same time.
    case = CASES[2]
    inputs = case.draw()
    x, expected = _to_jax(inputs), _expected(case, inputs)
    function = jax.jit(lambda *x: jax.lax.scan(
        lambda carry, _: (carry, _with_gradients(case)(*carry)), x, None, length=8)[1])
    found = []
    threads = [threading.Thread(target=lambda: found.append(function(*x))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert len(found) == 2, "a thread raised"
    for results in found:
        for i in range(8):
            expect_same_bits(_to_torch([a[i] for a in results]), expected, f"step {i}")


def test_donated_inputs():
    # XLA may put a result where an input was, which the kernels still read.
    case = CASES[0]
    inputs = case.draw()
    donating = jax.jit(_with_gradients(case), donate_argnums=(0, 1, 2, 3))
    copies = [jnp.array(x, copy=True) for x in _to_jax(inputs)]
    expect_same_bits(_to_torch(donating(*copies)), _expected(case, inputs), "donated")


def test_memory_is_linear_in_the_length():
    # A copy of every argument, or scores: 16384 squared in bfloat16 would be 512 MiB a head.
    cupy = pytest.importorskip("cupy")
    case = Case(16384, 16384, "causal", head_dim=128)
    x = _to_jax(case.draw())
    n_bytes = x[0].nbytes
    compiled = jax.jit(_with_gradients(case)).lower(*x).compile()
    torch.cuda.set_device(0)  # whose pool is read
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * n_bytes
    workspace = dashcupy.attention_plan(*x[:3], causal=True).workspace_bytes
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    wait_for_jax([compiled(*x) for _ in range(3)])
    assert pool.total_bytes() - before <= 2 * workspace + (4 << 20)


def test_empty_keys():
    # Buffers without an address.
    from dashcupy.jax import attention
    q, k = jnp.ones((2, 5, 4, 64), "bfloat16"), jnp.ones((2, 0, 4, 64), "bfloat16")
    out, lse = jax.jit(lambda q, k: attention(q, k, k, return_lse=True))(q, k)
    dq, dk = jax.jit(jax.grad(lambda q, k: attention(q, k, k).sum(), (0, 1)))(q, k)
    assert not out.any() and (lse == -jnp.inf).all() and not dq.any() and dk.shape == k.shape


@limit(90)
def test_what_the_gpu_refuses_says_so():
    # Our words must come through XLA, and the next call must be right.
    from dashcupy.jax import attention
    case = CASES[0]
    inputs = case.draw()
    x = _to_jax(inputs)
    single = [a.astype("float32") for a in x[:3]]
    with pytest.raises(dashcupy.UnsupportedError, match="float32"):
        attention(*single)
    with pytest.raises(jax.errors.JaxRuntimeError, match="UnsupportedError.*float32"):
        wait_for_jax(jax.jit(attention)(*single))
    expect_same_bits(_to_torch(jax.jit(_with_gradients(case))(*x)), _expected(case, inputs),
                     "after a refusal")
