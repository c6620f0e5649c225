"""The CPU backend: right values where tiles end and where softmax is extreme."""

import functools
import tracemalloc
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from dashcupy import cpu, schedules
from dashcupy.errors import InvalidInputError
from dashcupy.problem import Problem
from dashcupy.reference import (
    attention_backward_reference,
    attention_backward_terms,
    attention_backward_yardstick,
    attention_reference,
    attention_yardstick,
    error_report,
)

pytestmark = pytest.mark.filterwarnings("error")  # overflow and NaN must not spam the caller

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
MASKS = ("full", "causal", "causal_top_left")
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Tiles:
    q_tile: int
    kv_tile: int


SMALL = Tiles(32, 16)


def draw(dtype, q_len, kv_len, *, batch=2, heads=(2, 1), head_dim=8, seed=0, sizes=(1, 1, 1, 1)):
    """q, k, v, dout; normal, times ``sizes``."""
    rng = np.random.default_rng((seed, q_len, kv_len))
    of_q, of_k = (batch, q_len, heads[0], head_dim), (batch, kv_len, heads[1], head_dim)
    return [(size * rng.standard_normal(shape)).astype(dtype)
            for size, shape in zip(sizes, (of_q, of_k, of_k, of_q))]


def problem_of(q, k, mask="full", scale=None):
    batch, q_len, n_q_head, head_dim = q.shape
    return Problem(batch, q_len, k.shape[1], n_q_head, k.shape[2], head_dim, q.dtype.name, mask,
                   head_dim ** -0.5 if scale is None else scale)


def run(q, k, v, dout, mask="full", tiles=SMALL, schedule="auto"):
    """out, lse, dq, dk, dv."""
    problem = problem_of(q, k, mask)
    out, lse = cpu.forward(q, k, v, problem, tiles)
    return out, lse, *cpu.backward(dout, q, k, v, out, lse, problem, tiles, schedule)


def truth_of(q, k, v, dout, mask):
    return (*attention_reference(q, k, v, mask=mask),
            *attention_backward_reference(dout, q, k, v, mask=mask))


def yardstick_of(q, k, v, dout, mask):
    return (*attention_yardstick(q, k, v, mask=mask),
            *attention_backward_yardstick(dout, q, k, v, mask=mask))


def terms_of(q, k, v, dout, mask):
    return dict(zip(("dq", "dk"), attention_backward_terms(dout, q, k, v, mask=mask)))


def expected_of(inputs, mask):
    """What a result is compared with: truth, yardstick and terms."""
    return truth_of(*inputs, mask), yardstick_of(*inputs, mask), terms_of(*inputs, mask)


def check(inputs, mask="full", tiles=SMALL, schedule="auto", floor=None, expected=None):
    """Run and compare all five results; returns them."""
    results = run(*inputs, mask, tiles, schedule)
    truth, yardstick, terms = expected or expected_of(inputs, mask)
    for name, got, right, plain in zip(NAMES, results, truth, yardstick):
        report = error_report(got, right, plain, factor=2 if name in ("out", "lse") else 3,
                              floor=floor, terms=terms.get(name))
        assert report, f"{name}: {report}"
        assert got.dtype == (plain.dtype if name == "lse" else inputs[0].dtype)
    return results


# Lengths around the tiles of 32 q rows and 16 keys; unequal ones give causal rows without a key,
# keys that no row sees, and diagonals that cross tiles anywhere.
LENGTHS = ((1, 1), (15, 15), (16, 17), (31, 33), (32, 32), (33, 31), (100, 37), (37, 100), (1, 40),
           (64, 1))


@functools.cache
def around_tiles(dtype, mask):
    """(inputs, what is expected) for each of LENGTHS; the same for all schedules."""
    all_inputs = [draw(dtype, *lengths) for lengths in LENGTHS]
    return [(inputs, expected_of(inputs, mask)) for inputs in all_inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule, mask", [(name, mask) for name in schedules.names()
                                            for mask in MASKS if schedules.supports(name, mask)])
def test_every_schedule_mask_and_dtype(schedule, mask, dtype):
    for inputs, expected in around_tiles(dtype, mask):
        check(inputs, mask, SMALL, schedule, expected=expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_grouped_heads(heads):
    """A q head paired with the wrong kv head, or a member of the group lost from dk and dv."""
    check(draw(np.float32, 50, 40, heads=heads), "causal", Tiles(16, 16))


@pytest.mark.parametrize("tiles", [Tiles(16, 64), Tiles(7, 5), Tiles(512, 512)])
def test_other_tiles(tiles):
    """Tall, wide, odd, and larger than the problem."""
    for mask in MASKS:
        check(draw(np.float32, 70, 90), mask, tiles)


def test_chosen_tiles_are_blind_to_batch_and_heads():
    """Bits depend on the tiles, so the tiles must not depend on what stands beside a head."""
    for length in (1, 300, 5000):
        one = Problem(1, length, length, 1, 1, 64, "float32", "causal", 0.1)
        many = Problem(900, length, length, 64, 8, 64, "float32", "causal", 0.1)
        assert cpu.choose_tiles(one) == cpu.choose_tiles(many)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len, kv_len, batch", [(0, 7, 2), (7, 0, 2), (0, 0, 1), (5, 5, 0)])
def test_empty(q_len, kv_len, batch, dtype):
    """Zeros and lse -inf, never NaN or garbage from fresh memory."""
    inputs = draw(dtype, q_len, kv_len, batch=batch)
    out, lse, *gradients = run(*inputs, "causal")
    assert out.shape == inputs[0].shape and not out.any() and (lse == -np.inf).all()
    for gradient, like in zip(gradients, inputs):
        assert gradient.shape == like.shape and gradient.dtype == dtype and not gradient.any()


def test_unknown_or_unfit_schedule_is_refused():
    inputs = draw(np.float32, 4, 4)
    with pytest.raises(InvalidInputError, match="descending"):
        run(*inputs, schedule="descendin")
    with pytest.raises(InvalidInputError, match="not defined for the causal mask"):
        run(*inputs, "causal", schedule="shift")


@pytest.mark.parametrize("q_len, kv_len", [(70, 20), (76, 1), (146, 1), (34, 1)])
def test_causal_rows_without_a_key(q_len, kv_len):
    """More q rows than keys, inputs times 3: exact zeros where no key is seen, finite elsewhere."""
    inputs = draw(np.float16, q_len, kv_len, heads=(1, 1), head_dim=32, sizes=(3, 3, 3, 1))
    inputs[3][...] = 1
    out, lse, dq, dk, dv = check(inputs, "causal")
    blind = q_len - kv_len
    assert not out[:, :blind].any() and not dq[:, :blind].any()
    assert (lse[:, :, :blind] == -np.inf).all() and np.isfinite(lse[:, :, blind:]).all()


def test_keys_that_no_row_sees():
    """Top-left alignment with more keys than rows: exact zeros in dk and dv."""
    _, _, _, dk, dv = check(draw(np.float32, 20, 70), "causal_top_left")
    assert not dk[:, 20:].any() and not dv[:, 20:].any() and dv[:, :20].any()


@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_large_inputs_in_ragged_tiles(length):
    """Padded keys that enter the softmax turned dq into NaN."""
    check(draw(np.float16, length, length, head_dim=16, sizes=(5, 3, 3, 1)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_lse_far_below_zero(dtype, mask):
    """All scores near -120: exp(0 - lse) of padding overflows where lse < -88.7."""
    q, k, v, dout = draw(dtype, 704, 704, batch=1, heads=(1, 1), head_dim=64, sizes=(0, 0, 1, 1))
    q[..., 0], k[..., 0] = 1, -120 * 8
    _, lse, *_ = check((q, k, v, dout), mask, Tiles(128, 128))
    assert (lse < -88.7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_one_hot_softmax(dtype, mask):
    """q times 20: one key takes each row, the sums shrink by many powers of ten on the way."""
    floor = 1e-11 if dtype == np.float64 else 2e-4
    check(draw(dtype, 70, 50, sizes=(20, 1, 1, 1)), mask, floor=floor)


def test_length_1025():
    """One row past a tile, twice as many tiles: a backward that gave NaN elsewhere."""
    inputs = draw(ml_dtypes.bfloat16, 1025, 1025, batch=1, heads=(1, 1), head_dim=64)
    check(inputs, "causal", Tiles(*cpu.choose_tiles(problem_of(*inputs[:2], "causal"))))


def test_scale_is_used():
    q, k, v, _ = draw(np.float32, 40, 40)
    out, lse = cpu.forward(q, k, v, problem_of(q, k, "causal", 3.7), SMALL)
    want_out, want_lse = attention_reference(q, k, v, mask="causal", scale=3.7)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_scores_of_minus_infinity():
    """Keys of -inf that hide themselves: -inf - -inf where they fill the first tiles."""
    q, k, v, _ = draw(np.float32, 40, 100)
    q, hidden = np.abs(q), k.copy()
    hidden[:, :50] = -np.inf
    out, lse = cpu.forward(q, hidden, v, problem_of(q, k, "full"), SMALL)
    want_out, want_lse = attention_reference(q, k[:, 50:], v[:, 50:], mask="full")
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_memory_is_linear_in_the_lengths():
    """Whole score matrices would quadruple: 67 MB each for the longer one here."""
    def peak(length):
        inputs = draw(np.float32, length, length, batch=1, heads=(1, 1), head_dim=4)
        tracemalloc.start()
        run(*inputs, "causal", Tiles(128, 128))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    short, long = peak(1024), peak(4096)
    assert long < 4.2 * short and long < 4e6
