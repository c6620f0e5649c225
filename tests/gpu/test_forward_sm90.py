"""The Hopper forward: its tiles, q tiles that are done again, and who takes which q tile."""

import dataclasses

import dashcupy
import pytest
from dashcupy import env
from dashcupy.problem import CAUSAL_OF_MASK

from . import truth
from .support import Case, bits, expect_same_bits, launcher_of, torch

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

# Natural log: 2^144 is beyond the bound of a row's sum, 2^100, and of what float32 can hold;
# 2^115 beyond the first alone, 2^58 beyond neither.
LEVELS = {"below": 40.0, "beyond": 80.0, "infinite": 100.0}
N_HIGH = 32  # the keys with these scores are the first ones, in the kv tile that comes last


def forward(case: Case, inputs: dict, **options) -> dict:
    """``out`` and ``lse`` by the public function."""
    got = dashcupy.attention(*(inputs[name] for name in "qkv"), causal=CAUSAL_OF_MASK[case.mask],
                             return_lse=True, **options)
    return dict(zip(("out", "lse"), got))


def launch(case: Case, inputs: dict, max_ctas: int | None = None, counter: bool | None = None,
           **defines: int) -> dict:
    """``out`` and ``lse`` by the kernel of the plan, with some of what the plan says changed."""
    q, k, v = (inputs[name] for name in "qkv")
    plan = dashcupy.attention_plan(q, k, v, causal=CAUSAL_OF_MASK[case.mask], direction="forward")
    kernel, = plan.kernels
    kernel = dataclasses.replace(
        kernel, defines=tuple(sorted((dict(kernel.defines) | defines).items())),
        counter=kernel.counter if counter is None else counter)
    lse = q.new_empty(case.batch, case.n_q_head, case.q_len, dtype=torch.float32)
    x = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": lse}
    launcher_of(dataclasses.replace(plan, kernels=(kernel,)), x, max_ctas)()
    return {"out": x["out"], "lse": lse}


def check(case: Case, inputs: dict | None = None) -> dict:
    """Compute a case and compare out and lse with the truth."""
    inputs = case.draw() if inputs is None else inputs
    got = forward(case, inputs)
    arguments = (*(inputs[name] for name in ("q", "k", "v", "dout")), case.mask)
    exact = truth.attention(*arguments)
    yardstick = truth.attention(*arguments, dtype=getattr(torch, case.dtype))
    wrong = truth.faults(got, exact, yardstick)
    assert not wrong, "\n".join([str(case), *wrong])
    return got


def with_high_scores(case: Case, level: float, every: int) -> dict:
    """Inputs in which every ``every``-th row scores some ``level`` more with the first keys."""
    inputs = case.draw()
    inputs["q"][..., 0] = 0
    inputs["q"][:, ::every, :, 0] = 1
    inputs["k"][:, :N_HIGH, :, 0] = level * case.head_dim ** 0.5
    return inputs


@pytest.mark.parametrize(("head_dim", "dtype"), [
    (64, "bfloat16"), (96, "bfloat16"), (128, "float16"), (192, "bfloat16"), (200, "float16"),
    (256, "bfloat16")])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_tiles(head_dim, dtype, mask):
    # Rows and keys around the tiles, which differ by head_dim: a tail that is counted, a stage or
    # panel that is read before it has landed, columns of the next head.
    case = Case(1, 1, mask, head_dim, dtype, batch=2, n_q_head=4, n_kv_head=2)
    config = dashcupy.attention_plan(*(case.draw()[name] for name in "qkv"),
                                     direction="forward").config
    q, kv = config.q_tile, config.kv_tile
    for q_len, kv_len in ((1, 1), (q - 1, kv), (q, kv + 1), (q + 1, 3 * kv - 1), (64, 2 * kv),
                          (3 * q + 65, 7 * kv + 3), (2 * q + 1, kv - 1), (449, 1155)):
        check(case.replace(q_len=q_len, kv_len=kv_len))


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_rows_without_keys(head_dim):
    # 0 / 0; whole q tiles of such rows still take a kv tile, and results must be written.
    for case in (Case(900, 300, "causal", head_dim), Case(300, 0, "full", head_dim),
                 Case(300, 0, "causal", head_dim)):
        inputs = case.draw()
        into = (torch.full_like(inputs["q"], float("nan")), None)
        got = forward(case, inputs, out=into)
        dead = case.q_len - case.kv_len
        assert not got["out"][:, :dead].any() and (got["lse"][..., :dead] == float("-inf")).all()
        assert got["lse"][..., dead:].isfinite().all()
        if case.kv_len:
            check(case, inputs)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("level", LEVELS)
def test_scores_that_rise_after_the_first_tiles(level, head_dim):
    # References are fixed in the first kv tiles: sums and P overflow, and the q tile must be done
    # again. All rows of it, or one among normal ones.
    for mask in ("full", "causal"):
        for every in (1, 150):
            case = Case(500, 700, mask, head_dim, n_q_head=2, n_kv_head=1)
            got = check(case, with_high_scores(case, LEVELS[level], every))
            assert got["lse"].max() > LEVELS[level]


def test_float16_follows_its_maxima():
    # P ends at 65504 there.
    case = Case(500, 700, "causal", 128, "float16")
    check(case, with_high_scores(case, LEVELS["infinite"], 150))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_done_again_is_the_whole_q_tile(head_dim):
    # A redo of some rows, or one that goes on from the first try: bits would depend on chance.
    # Where all q tiles fail they are those of a kernel that follows its maxima from the start, and
    # where none does they do not depend on what other q tiles do.
    for mask in ("full", "causal"):
        case = Case(1000, 1000, mask, head_dim, batch=2, n_q_head=4, n_kv_head=4)
        high = with_high_scores(case, LEVELS["infinite"], 64)
        expect_same_bits(forward(case, high), launch(case, high, DC_FIXED_REFERENCE=0), mask)
        normal = with_high_scores(case, LEVELS["infinite"], 2000)
        normal["q"][:, 0, :, 0] = 0
        expected = forward(case, normal)
        normal["q"][:, 500, :, 0] = 1
        got = forward(case, normal)
        tile = dashcupy.attention_plan(*(normal[x] for x in "qkv"), direction="forward"
                                       ).config.q_tile
        rows = torch.arange(case.q_len) // tile != 500 // tile
        expect_same_bits({"out": got["out"][:, rows], "lse": got["lse"][..., rows]},
                         {"out": expected["out"][:, rows], "lse": expected["lse"][..., rows]},
                         f"{mask}: other q tiles than the one that was done again")


@pytest.mark.parametrize(("head_dim", "mask", "length"), [
    (64, "causal", 1100), (64, "causal", 900), (128, "causal", 1100), (128, "full", 1100),
    (192, "causal", 1100)])
@pytest.mark.parametrize("every", [2000, 300], ids=["plain", "some-again"])
def test_bits_do_not_depend_on_who_takes_which_q_tile(head_dim, mask, length, every):
    # The first q tile of a run sums in another order, or a CTA takes state from one to the next.
    case = Case(length, length, mask, head_dim, batch=3, n_q_head=8, n_kv_head=4)
    inputs = with_high_scores(case, LEVELS["beyond"], every)
    expected = forward(case, inputs)
    for max_ctas in (1, 7, 37, 114, 132):
        for counter in (False, True):
            expect_same_bits(launch(case, inputs, max_ctas, counter), expected,
                             f"{max_ctas} CTAs, {'counter' if counter else 'in turn'}")
    alone = {name: x[1:2] for name, x in inputs.items()}
    expect_same_bits(forward(case.replace(batch=1), alone),
                     {name: x[1:2] for name, x in expected.items()}, "item 1 of 3 alone")


def test_nan_is_done_again_once():
    # The verdict on a NaN never gets better; the rows beside it are right, the other tiles equal.
    case = Case(1000, 1000, "full", 128)
    inputs = case.draw()
    clean = forward(case, inputs)
    inputs["q"][:, 300] = float("nan")
    got = forward(case, inputs)
    assert got["out"][:, 300].isnan().all() and got["lse"][..., 300].isnan().all()
    rows = torch.arange(case.q_len) != 300
    assert got["out"][:, rows].isfinite().all()
    others = torch.arange(case.q_len) // 128 != 300 // 128
    assert torch.equal(bits(got["out"][:, others]), bits(clean["out"][:, others]))


def test_keys_that_no_row_sees_may_be_nan_in_every_layout():
    # A kv tile is loaded whole, and 0 * NaN is NaN.
    for head_dim in (64, 192):
        case = Case(200, 333, "causal_top_left", head_dim)
        inputs = case.draw()
        clean = forward(case, inputs)
        for name in ("k", "v"):
            inputs[name][:, 200:] = float("nan")
        expect_same_bits(forward(case, inputs), clean, f"head_dim {head_dim}")


@pytest.mark.skipif(env.debug(), reason="debug builds wait for the GPU, which no graph allows")
def test_a_graph_runs_beside_other_launches():
    # A replay and a launch that share a work counter leave q tiles out.
    case = Case(2000, 2000, "causal", 128, batch=2, n_q_head=16, n_kv_head=16)
    inputs = case.draw()
    expected = forward(case, inputs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        recorded = forward(case, inputs)
    for x in recorded.values():
        x.fill_(float("nan"))
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(stream):
            found.append(forward(case, inputs))
    torch.cuda.synchronize()
    for got in (recorded, *found):
        expect_same_bits(got, expected, "beside a graph")
