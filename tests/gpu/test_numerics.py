"""Results against float64: shapes, masks, dtypes and inputs that kernels are known to fail on."""

import dashcupy
import pytest

from .support import (
    HEAD_DIMS,
    SCHEDULED,
    Case,
    backward,
    check,
    expect_right,
    expect_same_bits,
    run,
    torch,
)

pytestmark = pytest.mark.gpu

# Rows of the largest tile of the portable kernels; the others divide it. Tiles of Hopper have tests
# of their own, see test_forward_sm90.py.
TILE = 128


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_schedule(schedule, mask, head_dim):
    # A wrong order or ticket: a part of dq that is lost or counted twice, a kv tile left out.
    # Odd tile counts, more q tiles than kv tiles and the other way round.
    for q_len, kv_len in ((1100, 1100), (650, 1300), (1300, 650)):
        check(Case(q_len, kv_len, mask, head_dim, n_kv_head=1, schedule=schedule))
    if mask == "causal":
        for q_len, kv_len in ((1100, 1100), (650, 1300), (1300, 650)):
            check(Case(q_len, kv_len, "causal_top_left", head_dim, n_kv_head=1,
                       schedule=schedule))


@pytest.mark.sm90
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_unordered(mask):
    # Sums that start from what the workspace held, or lose a part that is added as it comes.
    for q_len, kv_len in ((1100, 1100), (650, 1300), (1300, 650)):
        check(Case(q_len, kv_len, mask, 128, n_kv_head=1, schedule="unordered"))


@pytest.mark.parametrize(("head_dim", "mask", "dtype"), [
    (8, "causal", "bfloat16"), (40, "full", "float16"), (72, "causal", "float16"),
    (96, "full", "bfloat16"), (128, "causal", "float16"), (64, "full", "float16"),
    *(pytest.param(*case, marks=pytest.mark.sm90) for case in (
        (136, "causal", "float16"), (192, "full", "bfloat16"), (200, "causal", "bfloat16"),
        (256, "full", "float16")))])
def test_head_dim(head_dim, mask, dtype):
    # Padding columns that are not zero, or columns that belong to the next row; float16 read as
    # bfloat16.
    check(Case(200, 333, mask, head_dim, dtype, batch=2, n_q_head=4, n_kv_head=2))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("q_len", "kv_len"), [
    (1, 1), (1, 2 * TILE + 1), (2 * TILE + 1, 1), (TILE // 2 - 1, TILE // 2),
    (TILE // 2, TILE // 2 + 1), (TILE // 2 + 1, TILE // 2 - 1), (TILE - 1, TILE),
    (TILE, TILE - 1), (TILE + 1, TILE + 1), (2 * TILE + 1, 2 * TILE + 1), (TILE + 1, 3 * TILE - 1),
    (300, 100)])
def test_lengths(q_len, kv_len, head_dim):
    # Rows and keys of the last, partly filled tile: read, written or counted beyond the end.
    for mask in ("full", "causal", "causal_top_left"):
        check(Case(q_len, kv_len, mask, head_dim, batch=8, n_kv_head=1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(2048, 1024), (300, 100), (130, 1), (400, 129)])
def test_rows_that_see_no_key_are_zero(q_len, kv_len, head_dim):
    # 0 / 0, exp(-inf + inf), and dq that nobody writes: whole tiles of such rows, and parts.
    case = Case(q_len, kv_len, "causal", head_dim, batch=4)
    inputs = case.draw()
    nan = torch.full_like(inputs["q"], float("nan"))
    out, lse = dashcupy.attention(inputs["q"], inputs["k"], inputs["v"], causal=True,
                                  return_lse=True, out=(nan.clone(), None))
    dq, dk, dv = backward(case, inputs, out, lse, grads=(nan.clone(), None, None))
    expect_right(case, inputs, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    dead = q_len - kv_len
    assert not out[:, :dead].any() and not dq[:, :dead].any()
    assert (lse[:, :, :dead] == float("-inf")).all()
    assert out[:, dead:].any(-1).all() and lse[:, :, dead:].isfinite().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("batch", "q_len", "kv_len", "n_q_head"), [
    (2, 0, 5, 2), (2, 5, 0, 2), (2, 0, 0, 2), (0, 5, 7, 2), (2, 5, 700, 0)])
def test_nothing_to_attend(batch, q_len, kv_len, n_q_head, head_dim):
    # A grid of 0 CTAs is a launch error; results that no CTA writes must still be 0; without a q
    # head k and v have no tensor maps, and nobody hands back what is loaded of them.
    for mask in ("full", "causal", "causal_top_left"):
        case = Case(q_len, kv_len, mask, head_dim, batch=batch, n_q_head=n_q_head, n_kv_head=1)
        inputs = case.draw()
        got = run(case, inputs)
        for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
            assert got[name].shape == inputs[like].shape and not got[name].any(), name
        assert got["lse"].shape == (batch, n_q_head, q_len) and got["lse"].dtype == torch.float32
        assert (got["lse"] == float("-inf")).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("n_q_head", "n_kv_head"), [(4, 2), (6, 2), (16, 2), (12, 1)])
def test_grouped_heads(n_q_head, n_kv_head, head_dim):
    # q heads that meet the wrong kv head, and dk, dv that miss a head of the group. The schedule
    # has a name: what "auto" picks depends on whether heads are shared.
    case = Case(200, 333, "causal", head_dim, batch=2, n_q_head=n_q_head, n_kv_head=n_kv_head,
                schedule="descending")
    inputs = case.draw()
    got = check(case, inputs)
    repeat = n_q_head // n_kv_head
    every = run(case, inputs | {x: inputs[x].repeat_interleave(repeat, 2) for x in ("k", "v")})
    expect_same_bits({name: got[name] for name in ("out", "lse", "dq")}, every,
                     f"{case} against kv heads repeated by hand")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("scale", [1e-3, 0.5])
def test_scale(scale, head_dim):
    # The default in place of the argument; a scale that is applied twice, or to dk but not to dq.
    case = Case(200, 333, "full", head_dim)
    inputs = case.draw()
    out, lse = dashcupy.attention(inputs["q"], inputs["k"], inputs["v"], scale=scale,
                                  return_lse=True)
    dq, dk, dv = backward(case, inputs, out, lse, scale=scale)
    expect_right(case, inputs, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [64, 192, 704, 720])
def test_scores_far_below_zero(length, head_dim):
    # A padded key scores 0, and exp(0 - lse) overflows for lse below -88; randn never gets there.
    for mask in ("full", "causal"):
        case = Case(length, length, mask, head_dim)
        inputs = case.draw()
        for name in ("q", "k"):
            inputs[name].mul_(0.1)
        inputs["q"][..., 0] = 1.0
        inputs["k"][..., 0] = -120.0 * head_dim ** 0.5
        got = check(case, inputs)
        assert (got["lse"] < -88).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_hot_softmax(mask, head_dim):
    # Scores in the thousands: exp of a score that was not reduced by the maximum, lse in a 16-bit
    # type, or a rescaling by exp(-inf).
    got = check(Case(704, 704, mask, head_dim, factor=20.0))
    assert got["lse"].max() > 500


@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_few_keys_with_large_values(length):
    # Keys of a tile that is nearly all padding, masked after exp instead of before. Many items: the
    # error of the plain formula says little about fair errors when it comes from a few numbers.
    for case in (Case(length, length, "causal"), Case(length, length, "full", 40, "float16"),
                 Case(110, 2, "causal"), Case(34, 1, "causal")):
        case = case.replace(batch=32, factor=3.0)
        inputs = case.draw()
        inputs["q"].mul_(5 / 3)
        got = check(case, inputs)
        assert all(got[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_more_works_than_two_waves(mask, head_dim):
    # Works that a CTA takes second or third meet what the first left in shared memory or in the
    # counter; errors that only batches show.
    case = Case(640, 640, mask, head_dim, batch=8, n_q_head=16, n_kv_head=8)
    inputs = case.draw()
    got = check(case, inputs)
    for item in (0, 7):
        alone = run(case, {name: x[item:item + 1] for name, x in inputs.items()})
        expect_same_bits({name: x[item:item + 1] for name, x in got.items()}, alone,
                         f"item {item} in its batch against alone")


def test_more_sequences_than_a_grid_axis_or_32_bits_hold():
    # Grids are limited to 65,535 in y and z, and dq_accum has more than 2**31 elements here:
    # index arithmetic in 32 bits. Copies of 2,700 sequences must all give the same.
    case = Case(8, 8, "causal", batch=27, n_q_head=100, n_kv_head=100)
    few = case.draw()
    one = check(case, few)
    many = {name: x.repeat(100, 1, 1, 1) for name, x in few.items()}
    got = run(case, many)
    for name, x in got.items():
        same = (x.view(100, *one[name].shape) == one[name]).flatten(1).all(1)
        assert same.all(), f"{name}: copies {(~same).nonzero().flatten().tolist()[:8]} differ"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_nobody_sees_may_be_nan(head_dim):
    # 0 * NaN: keys that no row sees, and rows that see no key, must not be multiplied at all.
    case = Case(200, 333, "causal_top_left", head_dim)
    inputs = case.draw()
    clean = run(case, inputs)
    for name in ("k", "v"):
        inputs[name][:, 200:] = float("nan")
    expect_same_bits(run(case, inputs), clean, f"{case} with NaN in keys 200 .. 332")

    case = Case(333, 200, "causal", head_dim)
    inputs = case.draw()
    clean = run(case, inputs)
    for name in ("q", "dout"):
        inputs[name][:, :133] = float("nan")
    expect_same_bits(run(case, inputs), clean, f"{case} with NaN in rows 0 .. 132")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_that_see_no_key_stay_zero_beside_nan(head_dim):
    # 0 * NaN the other way round: a key that only other rows of the same q tile see.
    case = Case(333, 200, "causal", head_dim)
    inputs = case.draw()
    for name in ("k", "v"):
        inputs[name][:, 3] = float("nan")
    got = run(case, inputs)
    assert not got["out"][:, :133].any() and not got["dq"][:, :133].any()
    assert got["out"][:, 140:].isnan().any() and got["dq"][:, 140:].isnan().any()
