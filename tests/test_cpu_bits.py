"""The CPU backend's bit contract: order of the sums, and what the bits do not depend on."""

import functools
import hashlib
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dashcupy import cpu, schedules
from dashcupy.cpu_tiles import task_order
from dashcupy.errors import HangError
from dashcupy.problem import Problem
from dashcupy.schedules import Shape

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
MASKS = ("full", "causal", "causal_top_left")
NAMES = ("out", "lse", "dq", "dk", "dv")


def draw(dtype, q_len, kv_len, *, batch=2, heads=(4, 2), head_dim=8):
    rng = np.random.default_rng((q_len, kv_len))
    of_q, of_k = (batch, q_len, heads[0], head_dim), (batch, kv_len, heads[1], head_dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in (of_q, of_k, of_k, of_q)]


def run(q, k, v, dout, mask="causal", tiles=(32, 16), schedule="auto"):
    """out, lse, dq, dk, dv."""
    batch, q_len, n_q_head, head_dim = q.shape
    problem = Problem(batch, q_len, k.shape[1], n_q_head, k.shape[2], head_dim, q.dtype.name, mask,
                      head_dim ** -0.5)
    config = SimpleNamespace(q_tile=tiles[0], kv_tile=tiles[1])
    out, lse = cpu.forward(q, k, v, problem, config)
    return out, lse, *cpu.backward(dout, q, k, v, out, lse, problem, config, schedule)


def assert_same_bits(got, want):
    for name, a, b in zip(NAMES, got, want):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.tobytes() == b.tobytes(), f"{name}: {(a != b).sum()} of {a.size} differ"


# --- order ---------------------------------------------------------------------------------------

SHAPES = [Shape(n_q * 8 - 3, n_kv * 4 - 1, 8, 4, causal, offset)
          for n_q, n_kv in ((1, 1), (3, 7), (7, 3), (9, 9))
          for causal, offset in ((False, 0), (True, 0), (True, n_kv * 4 - 1 - n_q * 8 + 3))]


def schedules_for(causal):
    return [name for name in schedules.names() if schedules.supports(
        name, "causal" if causal else "full")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_task_order_keeps_both_orders(shape):
    """Every visible pair once; steps in order in each kv tile, tickets in each q tile."""
    for name in schedules_for(shape.causal):
        schedule = schedules.get(name)
        steps = {kv_tile: [] for kv_tile in range(shape.n_kv)}
        tickets = {q_tile: [] for q_tile in range(shape.n_q)}
        pairs = set()
        for kv_tile, q_tile, step, ticket in task_order(schedule, shape):
            assert schedule.q_tile(shape, kv_tile, step) == q_tile
            assert schedule.ticket(shape, kv_tile, q_tile) == ticket
            steps[kv_tile].append(step)
            tickets[q_tile].append(ticket)
            pairs.add((kv_tile, q_tile))
        assert all(found == list(range(len(found))) for found in steps.values())
        assert all(found == list(range(len(found))) for found in tickets.values())
        assert pairs == {(kv_tile, q_tile) for q_tile in range(shape.n_q)
                         for kv_tile in range(shape.num_kv_tiles(q_tile))}


def test_circular_wait_is_reported():
    """Two kv tiles that visit two q tiles in opposite order, each waiting for the other."""
    circle = SimpleNamespace(
        NAME="circle", num_work=lambda shape: 2, work_size=lambda shape, work: 1,
        kv_tile=lambda shape, work, part: work, num_steps=lambda shape, kv_tile: 2,
        q_tile=lambda shape, kv_tile, step: (kv_tile + step) % 2,
        ticket=lambda shape, kv_tile, q_tile: int(kv_tile == q_tile))
    with pytest.raises(HangError, match="circle.*never run"):
        list(task_order(circle, Shape.from_counts(2, 2)))


def summed(terms):
    """Left-to-right float32 sum."""
    return functools.reduce(lambda total, term: np.float32(total + term), terms, np.float32(0))


def known_terms(shape, group):
    """Inputs whose every term of dq, dk, dv is a known number, and results of adding them.

    All scores are 0 and lse is given as 0, so P is 1 where visible. Only the last row of a q tile
    has a dout, and dP is 1 there; only the first key of a kv tile has a k. Then dq of that row
    adds one number per kv tile, and dk and dv of that key one number per q head and q tile.
    """
    rng = np.random.default_rng(0)

    def numbers(*size):  # exact in float32, and 1s get lost beside a 2**24 that later cancels
        return rng.choice(np.float32([2 ** 24, -2 ** 24, 1, 3, -1]), size)

    last_rows = [min((i + 1) * shape.q_rows, shape.q_len) - 1 for i in range(shape.n_q)]
    first_keys = [j * shape.kv_rows for j in range(shape.n_kv)]
    of_dq, of_dk, of_dv = (numbers(shape.n_kv), numbers(group, shape.n_q),
                           numbers(group, shape.n_q))
    q, dout = np.zeros((2, 1, shape.q_len, group, 2), np.float32)
    k, v = np.zeros((2, 1, shape.kv_len, 1, 2), np.float32)
    k[0, first_keys, 0, 0] = of_dq
    v[..., 1] = 1
    dout[0, last_rows, :, 1] = 1
    q[0, last_rows, :, 1] = of_dk.T
    dout[0, last_rows, :, 0] = of_dv.T
    return (q, k, v, dout), last_rows, first_keys, (of_dq, of_dk, of_dv)


def sums_and_expected(name, shape, group):
    """(got, expected) of dq by ticket; of dk and dv by q head, then by step; by explicit sums."""
    (q, k, v, dout), last_rows, first_keys, (of_dq, of_dk, of_dv) = known_terms(shape, group)
    mask = "full" if not shape.causal else "causal" if shape.offset else "causal_top_left"
    problem = Problem(1, shape.q_len, shape.kv_len, group, 1, 2, "float32", mask, 1.0)
    config = SimpleNamespace(q_tile=shape.q_rows, kv_tile=shape.kv_rows)
    lse = np.zeros((1, group, shape.q_len), np.float32)
    schedule = schedules.get(name)
    dq, dk, dv = cpu.backward(dout, q, k, v, np.zeros_like(q), lse, problem, config, name)
    want_dq = []
    for q_tile in range(shape.n_q):
        contributors = sorted(range(shape.num_kv_tiles(q_tile)),
                              key=lambda j, i=q_tile: schedule.ticket(shape, j, i))
        want_dq.append(summed(of_dq[contributors]))
    want_dk, want_dv = [], []
    for kv_tile in range(shape.n_kv):
        visits = [(head, schedule.q_tile(shape, kv_tile, step)) for head in range(group)
                  for step in range(schedule.num_steps(shape, kv_tile))]
        want_dk.append(summed(of_dk[visit] for visit in visits))
        want_dv.append(summed(of_dv[visit] for visit in visits))
    return ((dq[0, last_rows, :, 0], np.repeat(np.array(want_dq)[:, None], group, 1)),
            (dk[0, first_keys, 0, 1], np.array(want_dk)),
            (dv[0, first_keys, 0, 0], np.array(want_dv)))


@pytest.mark.parametrize("shape", [Shape(93, 102, 8, 16), Shape(93, 102, 8, 16, True, 9),
                                   Shape(93, 102, 8, 4, True, 0)], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_sums_are_taken_in_the_order_of_the_schedule(shape, group):
    """The bits equal those of explicit sums."""
    seen = {}
    for name in schedules_for(shape.causal):
        sums = sums_and_expected(name, shape, group)
        for got, wanted in sums:
            np.testing.assert_array_equal(got, wanted)
        dq, dk, dv = (got.tobytes() for got, _ in sums)
        seen[name] = dq, dk + dv
    # The orders really are different ones, or the test would pass for any.
    assert len({dq for dq, _ in seen.values()}) >= 2
    assert seen["ascending"][1] != seen["descending"][1]


# --- what the bits do not depend on --------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len, kv_len, tiles", [(1, 1, (32, 16)), (5, 1, (32, 16)),
                                                  (1, 70, (32, 16)), (70, 90, (32, 16)),
                                                  (300, 300, (128, 256))])
def test_batch_position_and_heads(q_len, kv_len, tiles, dtype):
    """A head alone, and in the midst of a batch that is worked on in several chunks."""
    batch = 5 if q_len > 200 else 40
    q, k, v, dout = draw(dtype, q_len, kv_len, batch=batch, heads=(4, 2))
    together = run(q, k, v, dout, "causal", tiles)
    for item, kv_head in ((0, 0), (batch // 2, 1), (batch - 1, 1)):
        heads, kv_heads = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
        one = slice(item, item + 1)
        alone = run(q[one, :, heads], k[one, :, kv_heads], v[one, :, kv_heads],
                    dout[one, :, heads], "causal", tiles)
        out, lse, dq, dk, dv = together
        assert_same_bits(alone, (out[one, :, heads], lse[one, heads], dq[one, :, heads],
                                 dk[one, :, kv_heads], dv[one, :, kv_heads]))


def strided(kind, arrays):
    """The same values in other memory."""
    q, k, v, dout = arrays
    if kind == "fused":  # slices of one projection [batch, len, 3, heads, head_dim]
        fused = np.stack([q, k, v], axis=2)
        return fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], dout
    if kind == "heads first":
        return tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
                     for x in arrays)
    if kind == "length first":
        return tuple(np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
                     for x in arrays)
    if kind == "reversed":
        return tuple(x[:, ::-1, ::-1].copy()[:, ::-1, ::-1] for x in arrays)
    inside_nan = []
    for x in arrays:  # "inside nan": what lies around a slice must never be read
        larger = np.full([size + 5 for size in x.shape], np.nan, x.dtype)
        view = larger[2:-3, 2:-3, 2:-3, 2:-3]
        view[...] = x
        inside_nan.append(view)
    return tuple(inside_nan)


@pytest.mark.parametrize("kind", ["fused", "heads first", "length first", "reversed",
                                  "inside nan"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_strides_and_surroundings(kind, dtype):
    """Slices of fused projections and transposed layouts; the caller's arrays stay as they are."""
    inputs = draw(dtype, 70, 70, heads=(2, 2))
    views = strided(kind, inputs)
    for view in views:
        view.flags.writeable = False
    before = [view.tobytes() for view in views]
    assert_same_bits(run(*views), run(*inputs))
    assert before == [view.tobytes() for view in views]


def test_many_repeats():
    inputs = draw(np.float16, 100, 90)
    first = run(*inputs, schedule="symmetric_shift")
    for _ in range(100):
        assert_same_bits(run(*inputs, schedule="symmetric_shift"), first)


DIGEST = """
import hashlib, sys
sys.path[:0] = {path!r}
import numpy as np
import test_cpu_bits as here
results = here.run(*here.draw(np.float32, 300, 300), tiles=(128, 256))
print(hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest())
"""


def test_another_process():
    results = run(*draw(np.float32, 300, 300), tiles=(128, 256))
    here = hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest()
    there = subprocess.run([sys.executable, "-c", DIGEST.format(path=sys.path)], text=True,
                           capture_output=True, check=True, timeout=120).stdout.strip()
    assert there == here


def test_arithmetic_id_is_stable_and_names_numpy():
    """A name that changed from call to call would refuse what is in fact equal."""
    assert cpu.arithmetic_id() == cpu.arithmetic_id()
    assert cpu.arithmetic_id().startswith(f"numpy-{np.__version__}-")


# --- NaN stays where it belongs ------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_nan_stays_in_its_sequence_and_head(dtype):
    inputs = draw(dtype, 40, 40, batch=3, heads=(2, 2))
    clean = run(*inputs)
    for array in inputs:
        array[1, :, 0] = np.nan
    dirty = run(*inputs)
    assert np.isnan(dirty[0][1, :, 0]).all() and np.isnan(dirty[2][1, :, 0]).all()
    for got, want, heads_first in zip(dirty, clean, (False, True, False, False, False)):
        got[(1, 0) if heads_first else (1, slice(None), 0)] = 0
        want[(1, 0) if heads_first else (1, slice(None), 0)] = 0
    assert_same_bits(dirty, clean)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [16, 21, 47])
def test_future_keys_do_not_reach_the_past(place, bad):
    """A NaN or inf in k and v, hidden by the causal mask, in the tile of the rows before it."""
    q, k, v, dout = draw(np.float32, 48, 48)
    clean = run(q, k, v, dout)
    k[:, place:], v[:, place:] = bad, bad
    out, lse, dq, dk, dv = run(q, k, v, dout)
    assert not np.isfinite(out[:, place:]).any()
    assert_same_bits((out[:, :place], lse[:, :, :place], dq[:, :place]),
                     (clean[0][:, :place], clean[1][:, :, :place], clean[2][:, :place]))


@pytest.mark.parametrize("which", ["q", "dout"])
def test_past_rows_do_not_reach_future_keys(which):
    """dk and dv of a key take nothing from rows that do not see it, NaN or not."""
    inputs = draw(np.float32, 48, 48)
    _, _, _, dk, dv = run(*inputs)
    inputs["q k v dout".split().index(which)][:, :21] = np.nan
    _, _, _, got_dk, got_dv = run(*inputs)
    for got, want in ((got_dk, dk), (got_dv, dv)):
        assert np.isnan(got[:, :21]).any()
        assert got[:, 21:].tobytes() == want[:, 21:].tobytes()


def test_nan_in_rows_without_a_key_goes_nowhere():
    q, k, v, dout = draw(np.float32, 60, 25)
    clean = run(q, k, v, dout)
    q[:, :35], dout[:, :35] = np.nan, np.nan
    assert_same_bits(run(q, k, v, dout), clean)


def test_nan_in_keys_that_no_row_sees_goes_nowhere():
    q, k, v, dout = draw(np.float32, 25, 60)
    clean = run(q, k, v, dout, "causal_top_left")
    k[:, 25:], v[:, 25:] = np.nan, np.nan
    assert_same_bits(run(q, k, v, dout, "causal_top_left"), clean)
