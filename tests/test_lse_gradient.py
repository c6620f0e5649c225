"""The gradient through lse: values, rows that see no key, arguments, and what a GPU is told."""

import ml_dtypes
import numpy as np
import pytest
from fake_frameworks import FakeTensor, install_torch
from fake_gpu import FakeArray, fake_gpu

import dashcupy
from dashcupy import arrays, ready, schedules
from dashcupy.errors import InvalidInputError
from dashcupy.problem import CAUSAL_OF_MASK, MASKS
from dashcupy.reference import (
    attention_backward_reference,
    attention_backward_yardstick,
    attention_reference,
    error_report,
)

Q, K, LSE = (2, 37, 6, 24), (2, 53, 3, 24), (2, 6, 37)
TALL = (2, 53, 6, 24), (2, 37, 3, 24)  # causal: 16 rows see no key


def draw(q=Q, k=K, dtype=np.float64):
    """q, k, v and dout, and dlse in the dtype of lse."""
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal(shape).astype(dtype)
         for name, shape in (("q", q), ("k", k), ("v", k), ("dout", q))}
    dlse = 3 * rng.standard_normal((q[0], q[2], q[1]))
    return x, dlse.astype(np.float64 if dtype == np.float64 else np.float32)


def backward(x, dlse, mask="full", **options):
    """dq, dk, dv of the public functions."""
    causal = CAUSAL_OF_MASK[mask]
    out, lse = dashcupy.attention(x["q"], x["k"], x["v"], causal=causal, return_lse=True,
                                  scale=options.get("scale"))
    return dashcupy.attention_backward(**x, out=out, lse=lse, dlse=dlse, causal=causal, **options)


def expect_same_bits(found, expected):
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


# --- the reference -------------------------------------------------------------------------------

@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", [(Q, K), TALL])
def test_reference_agrees_with_finite_differences(mask, shapes):
    """Derivative of sum(out * dout) + sum(lse * dlse) along a random direction of each input."""
    x, dlse = draw(*shapes)
    gradients = attention_backward_reference(**x, mask=mask, scale=0.3, dlse=dlse)

    def loss(**moved):
        inputs = x | moved
        out, lse = attention_reference(*(inputs[name] for name in "qkv"), mask=mask, scale=0.3)
        return (out * x["dout"]).sum() + np.where(lse == -np.inf, 0, lse * dlse).sum()

    for name, gradient in zip("qkv", gradients):
        direction = np.random.default_rng(1).standard_normal(x[name].shape)
        slope = (loss(**{name: x[name] + 1e-5 * direction})
                 - loss(**{name: x[name] - 1e-5 * direction})) / 2e-5
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-7)


def test_reference_by_hand():
    """d lse / d q is the mean of the keys by their weights, times the scale; v takes no part."""
    x, dlse = draw()
    x["dout"][...] = 0
    mean_key, _ = attention_reference(x["q"], x["k"], x["k"], scale=0.3)
    dq, _, dv = attention_backward_reference(**x, scale=0.3, dlse=dlse)
    np.testing.assert_allclose(dq, 0.3 * dlse.transpose(0, 2, 1)[..., None] * mean_key, rtol=1e-11)
    assert not dv.any()


# --- the CPU -------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", [(Q, K), TALL])
def test_values(shapes, mask, dtype):
    x, dlse = draw(*shapes, dtype)
    options = dict(mask=mask, scale=0.3, dlse=dlse)
    exact, fair = (function(**x, **options) for function in (
        attention_backward_reference, attention_backward_yardstick))
    for name, got, right, plain in zip(("dq", "dk", "dv"), backward(x, dlse, mask, scale=0.3),
                                       exact, fair):
        report = error_report(got, right, plain, factor=3)
        assert report and got.dtype == dtype, f"{name}: {report}"


@pytest.mark.parametrize("schedule", schedules.names())
def test_every_schedule(schedule):
    """More than one tile; a q head whose rows meet those of another one."""
    x, dlse = draw((1, 600, 4, 8), (1, 700, 2, 8))
    for mask in MASKS:
        if not schedules.supports(schedule, mask):
            continue
        for got, right in zip(backward(x, dlse, mask, schedule=schedule),
                              attention_backward_reference(**x, mask=mask, dlse=dlse)):
            np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_give_the_bits_of_none(mask, dtype):
    """Frameworks hand over zeros for an lse that nobody uses."""
    x, dlse = draw(*TALL, dtype)
    nothing = backward(x, None, mask)
    expect_same_bits(backward(x, np.zeros_like(dlse), mask), nothing)
    assert backward(x, dlse, mask)[0].tobytes() != nothing[0].tobytes()


def test_rows_that_see_no_key():
    """Their lse is -inf whatever q is: no value of dlse may come through."""
    x, dlse = draw(*TALL)
    expected = backward(x, dlse, "causal")
    for value in (np.nan, np.inf, -np.inf, 1e300):
        dlse[:, :, :16] = value
        found = backward(x, dlse, "causal")
        expect_same_bits(found, expected)
        assert not found[0][:, :16].any()
        for got, right in zip(attention_backward_reference(**x, mask="causal", dlse=dlse), found):
            np.testing.assert_allclose(got, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("q, k", [
    ((2, 0, 6, 24), K), (Q, (2, 0, 3, 24)), ((0, *Q[1:]), (0, *K[1:]))])
def test_empty_inputs(q, k):
    x, dlse = draw(q, k, np.float32)
    for gradient, like in zip(backward(x, dlse), (q, k, k)):
        assert gradient.shape == like and not gradient.any()


def test_strides_do_not_change_bits():
    """Transposed, reversed and broadcast arrays, which only the CPU takes."""
    x, dlse = draw()
    expected = backward(x, dlse)
    for view in (dlse.T.copy().T, dlse[..., ::-1].copy()[..., ::-1],
                 np.concatenate((dlse, dlse), 1)[:, :6]):
        expect_same_bits(backward(x, view), expected)
    same = np.full((2, 6, 1), 0.5)
    expect_same_bits(backward(x, np.broadcast_to(same, LSE)), backward(x, np.full(LSE, 0.5)))


def test_dlse_may_be_lse_itself():
    """Half the sum of lse ** 2 as a loss."""
    x, _ = draw()
    out, lse = dashcupy.attention(x["q"], x["k"], x["v"], return_lse=True)
    x["dout"] = np.zeros(Q)
    found = dashcupy.attention_backward(**x, out=out, lse=lse, dlse=lse)
    expect_same_bits(found, backward(x, lse.copy()))
    moved = x["k"] + 1e-6 * (direction := np.random.default_rng(2).standard_normal(K))
    _, there = dashcupy.attention(x["q"], moved, x["v"], return_lse=True)
    assert ((there**2 - lse**2) / 2e-6).sum() == pytest.approx(
        (found[1] * direction).sum(), rel=1e-4)


@pytest.mark.parametrize("change, message", [
    (lambda a: a[:, :, 1:], r"dlse has shape \(2, 6, 36\), expected \[batch, n_q_head, q_len\] = "
                            r"\(2, 6, 37\)"),
    (lambda a: a.transpose(0, 2, 1), "dlse has shape"),
    (lambda a: a[0], "dlse has shape"),
    (lambda a: a.astype(np.float64), "dlse has dtype float64, expected float32: .*cast dlse"),
    (lambda a: a.astype(np.float16), "dlse has dtype float16"),
    (lambda a: 1.0, "dlse is a builtins.float, not an array"),
    (lambda a: a.tolist(), "dlse is a builtins.list, not an array"),
    (lambda a: np.ma.masked_array(a), "dlse is a masked array")])
def test_wrong_arguments(change, message):
    x, dlse = draw(dtype=np.float32)
    with pytest.raises(InvalidInputError, match=message):
        backward(x, change(dlse))


def test_gradients_over_dlse_are_refused():
    """It is still read while they are written."""
    x, dlse = draw()
    memory = np.zeros(Q)
    inside = memory.reshape(-1)[:dlse.size].reshape(LSE)
    with pytest.raises(InvalidInputError, match="dq shares memory with dlse"):
        backward(x, inside, grads=(memory, None, None))
    grads = backward(x, dlse, grads=(memory, None, None))
    assert grads[0] is memory


# --- what a GPU is told --------------------------------------------------------------------------

GPU_Q, GPU_K, GPU_LSE = (2, 300, 8, 64), (2, 500, 2, 64), (2, 8, 300)
# Compute capability, head_dim.
KERNELS = [((8, 0), 64), ((9, 0), 64), ((9, 0), 128), ((9, 0), 192), ((9, 0), 256)]


def on_gpu(kind=FakeArray, head_dim=64):
    shapes = {"dout": GPU_Q, "q": GPU_Q, "k": GPU_K, "v": GPU_K, "out": GPU_Q}
    made = {name: kind((*shape[:3], head_dim)) for name, shape in shapes.items()}
    return made | {"lse": kind(GPU_LSE, "float32")}


@pytest.mark.parametrize("capability, head_dim", KERNELS)
def test_address_and_strides_reach_the_kernel(monkeypatch, capability, head_dim):
    """Null without dlse, also in a call that takes over the memory of one that had it."""
    x = on_gpu(head_dim=head_dim)
    dlse = FakeArray(GPU_LSE, "float32", strides=(2501, 307, 1), pointer=(1 << 45) + 4)
    with fake_gpu(monkeypatch, compute_capability=capability) as gpu:
        for given in (dlse, None, dlse, None, None, dlse):
            dashcupy.attention_backward(**x, dlse=given)
            before = next(launch for launch in gpu.launches if launch.kernel == "bwd_preprocess")
            assert [before.fields[name] for name in ("dlse", "dlse_batch", "dlse_head")] == (
                [0, 0, 0] if given is None else [dlse.data.ptr, 2501, 307])
            assert [before.fields[name] for name in ("lse", "lse_batch", "lse_head")] == [
                x["lse"].data.ptr, 2400, 300]
            assert before.fields["dout"] == x["dout"].data.ptr
            assert "copy_rows" not in [launch.kernel for launch in gpu.launches]
            gpu.launches.clear()


@pytest.mark.parametrize("kind", [FakeArray, FakeTensor])
def test_a_call_is_known_again(monkeypatch, kind):
    """Each of the two kinds by its own launcher, with the address of the call."""
    install_torch(monkeypatch)
    with fake_gpu(monkeypatch) as gpu:
        first, second = (kind(GPU_LSE, "float32") for _ in range(2))
        for given in (first, None):
            dashcupy.attention_backward(**on_gpu(kind), dlse=given)
        monkeypatch.setattr(arrays, "borrow_all", None)  # the way of a call that is not known
        for given in (second, None):
            dashcupy.attention_backward(**on_gpu(kind), dlse=given)
        assert len(ready._known) == 2
        addresses = [x.data.ptr if kind is FakeArray else x.data_ptr() for x in (first, second)]
        assert [launch.fields["dlse"] for launch in gpu.launches
                if launch.kernel == "bwd_preprocess"] == [addresses[0], 0, addresses[1], 0]


@pytest.mark.parametrize("dlse, message", [
    (FakeArray(GPU_LSE, "float32", pointer=(1 << 44) + 2), "no multiple of its element's size"),
    (FakeArray(GPU_LSE, "float32", strides=(1, 600, 2)), "dlse has strides .*copy dlse to C order"),
    (FakeArray(GPU_LSE, "float32", strides=(0, 0, 0)), "dlse has strides .*copy dlse to C order"),
    (FakeArray(GPU_LSE, "float32", device=1), "q is on GPU 0 and dlse on GPU 1"),
    (FakeArray(GPU_LSE, "float16"), "dlse has dtype float16, expected float32"),
    (np.zeros(GPU_LSE, np.float32), "dlse a numpy.ndarray: all arrays must come from one")])
def test_what_a_kernel_could_not_read_is_refused(monkeypatch, dlse, message):
    with fake_gpu(monkeypatch) as gpu:
        for _ in range(2):
            with pytest.raises(InvalidInputError, match=message):
                dashcupy.attention_backward(**on_gpu(), dlse=dlse)
        assert not gpu.launches


def test_gpu_gradients_over_dlse_are_refused(monkeypatch):
    """Also in a call that is known but for its addresses."""
    with fake_gpu(monkeypatch) as gpu:
        x, dq = on_gpu(), FakeArray(GPU_Q)
        dashcupy.attention_backward(**x, dlse=FakeArray(GPU_LSE, "float32"), grads=(dq, None, None))
        n_launches = len(gpu.launches)
        over = FakeArray(GPU_LSE, "float32", pointer=dq.data.ptr + 160)
        with pytest.raises(InvalidInputError, match="dq shares memory with dlse"):
            dashcupy.attention_backward(**x, dlse=over, grads=(dq, None, None))
        assert len(gpu.launches) == n_launches
