"""The float64 truth against hand-derived values and finite differences, and the error bounds."""

import math

import ml_dtypes
import numpy as np
import pytest

from dashcupy.errors import InvalidInputError
from dashcupy.reference import (
    attention_backward_reference,
    attention_backward_terms,
    attention_backward_yardstick,
    attention_reference,
    attention_yardstick,
    error_report,
)

INF = math.inf


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def test_two_keys_by_hand():
    """Softmax, natural-log lse and scale, from the definition."""
    q, k, v = (np.array(x, float).reshape(1, -1, 1, 1) for x in ([2.0], [0.5, -1.5], [10.0, 20.0]))
    a, b = math.exp(3.0 * 2.0 * 0.5), math.exp(3.0 * 2.0 * -1.5)
    out, lse = attention_reference(q, k, v, scale=3.0)
    assert out.item() == pytest.approx((10 * a + 20 * b) / (a + b), rel=1e-14)
    assert lse.item() == pytest.approx(math.log(a + b), rel=1e-14)


def test_default_scale_is_one_over_root_head_dim():
    q, k, v = draw(0, (1, 3, 1, 16), (1, 3, 1, 16), (1, 3, 1, 16))
    for got, want in zip(attention_reference(q, k, v), attention_reference(q, k, v, scale=0.25)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("q_len, kv_len, mask, counts", [
    (3, 5, "full", [5, 5, 5]),
    (3, 5, "causal", [3, 4, 5]),
    (3, 5, "causal_top_left", [1, 2, 3]),
    (5, 3, "causal", [0, 0, 1, 2, 3]),
    (5, 3, "causal_top_left", [1, 2, 3, 3, 3]),
])
def test_each_row_sees_the_right_keys(q_len, kv_len, mask, counts):
    """Masks off by one, or aligned to the wrong corner."""
    # v = one-hot of the key: equal scores give 1 / count for each visible key, in order.
    v = np.eye(kv_len).reshape(1, kv_len, 1, kv_len)
    q, k = np.zeros((1, q_len, 1, kv_len)), np.zeros((1, kv_len, 1, kv_len))
    out, lse = attention_reference(q, k, v, mask=mask)
    want = np.array([[1 / n if j < n else 0.0 for j in range(kv_len)] for n in counts])
    np.testing.assert_allclose(out[0, :, 0], want, rtol=1e-15)
    np.testing.assert_allclose(lse[0, 0], [math.log(n) if n else -INF for n in counts], rtol=1e-15)


@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left"])
@pytest.mark.parametrize("q_len, kv_len", [(4, 6), (6, 4)])
def test_gradients_agree_with_finite_differences(mask, q_len, kv_len):
    """Derivative of sum(out * dout) along a random direction of q, k and v, with grouped heads."""
    q, k, v, dout = draw(1, (2, q_len, 4, 3), (2, kv_len, 2, 3), (2, kv_len, 2, 3),
                         (2, q_len, 4, 3))
    gradients = attention_backward_reference(dout, q, k, v, mask=mask)
    for index, (array, gradient) in enumerate(zip((q, k, v), gradients)):
        direction, = draw(2 + index, array.shape)
        step = 1e-5 * direction
        losses = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[index] = array + sign * step
            losses.append((attention_reference(*moved, mask=mask)[0] * dout).sum())
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-7, abs=1e-8)


def test_lse_merges_two_halves_of_the_keys():
    """An lse in another base would weigh the halves wrongly."""
    q, k, v = draw(3, (1, 5, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    out, lse = attention_reference(q, k, v)
    (out_a, lse_a), (out_b, lse_b) = (attention_reference(q, k[:, part], v[:, part])
                                      for part in (slice(0, 4), slice(4, 9)))
    np.testing.assert_allclose(np.logaddexp(lse_a, lse_b), lse, rtol=1e-14)
    weight_a, weight_b = (np.exp(part - lse).transpose(0, 2, 1)[..., None]
                          for part in (lse_a, lse_b))
    np.testing.assert_allclose(weight_a * out_a + weight_b * out_b, out, atol=1e-14)


def test_rows_without_a_key_are_zero():
    q, k, v, dout = draw(4, (1, 5, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4), (1, 5, 1, 4))
    out, lse = attention_reference(q, k, v, mask="causal")
    dq, dk, dv = attention_backward_reference(dout, q, k, v, mask="causal")
    assert not out[:, :3].any() and (lse[:, :, :3] == -INF).all() and not dq[:, :3].any()
    # and they give nothing to dk and dv: the last two rows alone are the same problem
    alone = attention_backward_reference(dout[:, 3:], q[:, 3:], k, v, mask="causal")
    for got, want in zip((dq[:, 3:], dk, dv), alone):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("q_len, kv_len", [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths_give_zeros(q_len, kv_len):
    q, k, v, dout = draw(5, (2, q_len, 2, 4), (2, kv_len, 1, 4), (2, kv_len, 1, 4),
                         (2, q_len, 2, 4))
    out, lse = attention_reference(q, k, v)
    assert out.shape == q.shape and not out.any() and (lse == -INF).all()
    for gradient, like in zip(attention_backward_reference(dout, q, k, v), (q, k, v)):
        assert gradient.shape == like.shape and not gradient.any()


def test_terms_by_hand():
    """Rows of one, two and no keys, two q heads to a kv head: the sizes of all terms, no delta."""
    q, k, v, dout = draw(9, (1, 3, 2, 4), (1, 2, 1, 4), (1, 2, 1, 4), (1, 3, 2, 4))
    _, lse = attention_reference(q, k, v, mask="causal", scale=3.0)
    dq, dk = np.zeros(q.shape), np.zeros(k.shape)
    for head, row, key in np.ndindex(2, 3, 2):
        if key <= row - 1:
            weight = math.exp(3.0 * (q[0, row, head] @ k[0, key, 0]) - lse[0, head, row])
            term = 3.0 * weight * sum(abs(dout[0, row, head] * v[0, key, 0]))
            dq[0, row, head] += term * abs(k[0, key, 0])
            dk[0, key, 0] += term * abs(q[0, row, head])
    for got, want in zip(attention_backward_terms(dout, q, k, v, mask="causal", scale=3.0),
                         (dq, dk)):
        np.testing.assert_allclose(got, want, rtol=1e-13)


def test_bad_arguments_are_refused():
    q, k, v = draw(6, (1, 2, 3, 4), (1, 2, 2, 4), (1, 2, 2, 4))
    with pytest.raises(InvalidInputError, match="multiple of the number of kv heads"):
        attention_reference(q, k, v)
    with pytest.raises(InvalidInputError, match="mask"):
        attention_reference(k, k, v, mask="causal_bottom_left")


@pytest.mark.parametrize("dtype, eps", [(np.float16, 2.0 ** -10), (ml_dtypes.bfloat16, 2.0 ** -7),
                                        (np.float32, 2.0 ** -23)])
def test_yardstick_errs_as_its_dtype_does(dtype, eps):
    """It rounds P and dS: neither exact by accident, nor worse than some roundings."""
    q, k, v, dout = (x.astype(dtype) for x in draw(7, *[(1, 40, 2, 16)] * 4))
    truth = (attention_reference(q, k, v)[0], *attention_backward_reference(dout, q, k, v))
    yardstick = (attention_yardstick(q, k, v)[0], *attention_backward_yardstick(dout, q, k, v))
    for right, measured in zip(truth, yardstick):
        assert measured.dtype == dtype
        error = np.abs(measured.astype(float) - right).max() / np.abs(right).max()
        assert 0.05 * eps < error < 8 * eps


def test_yardstick_rounds_p():
    """Three equal scores: P is 1/3 rounded to bfloat16, so their sum misses 1."""
    q = np.zeros((1, 1, 1, 1), ml_dtypes.bfloat16)
    k, v = np.zeros((1, 3, 1, 1), q.dtype), np.full((1, 3, 1, 1), 256, q.dtype)
    third = float(np.float64(1 / 3).astype(q.dtype))
    out, _ = attention_yardstick(q, k, v)
    assert out.item() == np.float64(256 * 3 * third).astype(q.dtype)
    assert attention_reference(q, k, v)[0].item() == pytest.approx(256, rel=1e-15)


def report_for(change):
    rng = np.random.default_rng(8)
    truth = rng.standard_normal((2, 512, 4, 64))
    yardstick = truth.astype(np.float16)
    got = yardstick.copy()
    change(got)
    return error_report(got, truth, yardstick)


def test_report_accepts_what_the_plain_formula_does():
    report = report_for(lambda got: None)
    assert report and report.max_error > 0 and "max error" in str(report)


@pytest.mark.parametrize("change", [
    lambda got: got.__setitem__((0, 0, 0, 0), np.nan),
    lambda got: got.__setitem__((0, 0, 0, 0), np.inf),
    lambda got: got.__setitem__((1, 511, 3, 63), got[1, 511, 3, 63] + np.float16(0.02)),
    lambda got: got.__setitem__((0, slice(0, 16), 0), 0),
    lambda got: np.add(got, np.float16(1.5e-3), out=got),
], ids=["nan", "inf", "one value off", "one tile lost", "all a little off"])
def test_report_catches(change):
    assert not report_for(change)


def test_frobenius_bound_catches_small_errors_everywhere():
    """Each value is within the max-abs bound: a max-only test would let them all pass."""
    report = report_for(lambda got: np.add(got, np.float16(3e-3), out=got))
    assert report.max_error <= report.max_bound and not report


def test_report_compares_infinite_lse():
    truth = np.array([-INF, 1.0])
    assert error_report(truth.astype(np.float32), truth, truth.astype(np.float32))
    for wrong in ([0.0, 1.0], [INF, 1.0], [-INF, -INF], [np.nan, 1.0]):
        assert not error_report(np.float32(wrong), truth, truth.astype(np.float32))


@pytest.mark.parametrize("dtype, cut_off", [(np.float16, True), (ml_dtypes.bfloat16, True),
                                            (np.float32, False), (np.float64, False)])
def test_terms_allow_roundings_of_tensor_cores(dtype, cut_off):
    """Nothing more, nothing where there are none, and nothing to what tensor cores do not sum."""
    eps, zeros, terms = 2.0 ** -23, np.zeros(3), np.array([0.5, 8.0, 0.0])
    for error, ok in ((31 * eps, cut_off), (33 * eps, False), (np.nan, False)):
        got = np.array([0, error, 0]).astype(dtype)
        assert error_report(got, zeros, zeros, floor=0.0, terms=terms).ok == ok
        assert not error_report(got, zeros, zeros, floor=0.0)


def test_an_infinite_bound_is_none():
    """The plain formula leaves float16: any result would do."""
    truth = np.array([1e6, 1.0])
    with np.errstate(over="ignore"):
        yardstick = truth.astype(np.float16)
    assert not error_report(np.zeros(2, np.float16), truth, yardstick)
