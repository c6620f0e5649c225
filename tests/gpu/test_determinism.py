"""Bits never change: repeats, load, processes, SM counts, batches and CUDA graphs, by bytes."""

import itertools

import dashcupy
import pytest
from dashcupy import call, env, schedules
from dashcupy.plan import head_group
from dashcupy.problem import CAUSAL_OF_MASK

from . import kernels
from .support import (
    DEVICE,
    HEAD_DIMS,
    NAMES,
    PROCESS_LIMIT_S,
    SCHEDULED,
    Case,
    backward,
    bits,
    check,
    digest,
    digests,
    expect_same_bits,
    in_new_process,
    launcher_of,
    limit,
    run,
    torch,
    with_pauses,
)

pytestmark = pytest.mark.gpu

# 11 kv tiles a head and 352 works: more than two waves of CTAs, teams that meet SMs in any order,
# a pair that is alone, two q heads for a kv head.
RACY = Case(1400, 1400, batch=4, n_q_head=16, n_kv_head=8)


def expect_equal_repeats(case: Case, n_repeat: int, before=lambda i: None) -> None:
    """Fail if any byte of any result differs from the first run in any of ``n_repeat`` runs.

    Results are written into arrays that were filled with NaN, and compared on the GPU, so that the
    kernels of a repeat start right behind the comparison of the one before.
    """
    inputs = case.draw()
    expected = run(case, inputs)
    into = {name: torch.empty_like(x) for name, x in expected.items()}
    wrong = {name: torch.zeros((), dtype=torch.int64, device=DEVICE) for name in NAMES}
    arguments = [inputs[name] for name in ("q", "k", "v")]
    for i in range(n_repeat):
        for x in into.values():
            x.fill_(float("nan"))
        before(i)
        dashcupy.attention(*arguments, causal=CAUSAL_OF_MASK[case.mask], return_lse=True,
                           out=(into["out"], into["lse"]))
        backward(case, inputs, into["out"], into["lse"],
                 grads=tuple(into[name] for name in ("dq", "dk", "dv")))
        for name, x in into.items():
            wrong[name] += (bits(x) != bits(expected[name])).any()
    count = {name: int(x) for name, x in wrong.items()}
    assert not any(count.values()), f"{case}: of {n_repeat} repeats differ {count}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_repeats(schedule, mask, head_dim):
    # A read of dq_accum before the write it follows, a turn that ends too early, dk and dv that
    # depend on who comes first.
    expect_equal_repeats(RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim), 100)


def test_many_short_sequences_repeat():
    # Reported of others: gradients wrong in some of the runs only at many short kv sequences.
    case = Case(2048, 128, "full", 128, batch=100, n_q_head=1, n_kv_head=1, factor=3.0)
    check(case)
    expect_equal_repeats(case, 50)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_repeats_under_load(schedule, mask, head_dim):
    # SMs that are taken by others for a while: CTAs start late, elsewhere, in another order. The
    # load ends by itself, at the latest when the repeats have ended.
    streams = [torch.cuda.Stream() for _ in range(2)]
    matrix = torch.randn(2048, 2048, device=DEVICE).bfloat16()
    spin_stream = streams[0].cuda_stream
    kernels.spin(1, 1, spin_stream)

    def load(i):
        kernels.spin(10 + 37 * i % 100, 60_000 + 50_000 * (i % 5), spin_stream)
        with torch.cuda.stream(streams[1]):
            matrix @ matrix

    case = RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim)
    expect_equal_repeats(case, 30, load)
    torch.cuda.synchronize()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_random_delays(schedule, mask, head_dim):
    # Warps of one CTA that meet in an order which no run has shown so far: with DC_DELAY those of
    # the Hopper backwards pause now and then. A barrier or a fence that is missing, and a hang.
    # More than three kv tiles a CTA: places are used a third time.
    case = RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim, batch=5)
    inputs = case.draw()
    expected = run(case, inputs)
    plan = with_pauses(dashcupy.attention_plan(
        *(inputs[name] for name in "qkv"), causal=CAUSAL_OF_MASK[mask], schedule=schedule))
    into = {name: torch.empty_like(expected[name]) for name in ("dq", "dk", "dv")}
    launch = launcher_of(plan, inputs | {name: expected[name] for name in ("out", "lse")} | into)
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    for i in range(5):
        for x in into.values():
            x.fill_(float("nan"))
        launch(workspace)
        expect_same_bits(into, {name: expected[name] for name in into}, f"{case}, repeat {i}")


@limit(PROCESS_LIMIT_S + 20)
@pytest.mark.parametrize("head_dims", [(64, 128), pytest.param((192, 256), marks=pytest.mark.sm90)])
def test_another_process(head_dims):
    # Addresses, allocation order, the state of caches: anything that lives as long as a process.
    here = [line for head_dim in head_dims for line in digests(RACY.replace(head_dim=head_dim))]
    code = ("from gpu.support import digests\nfrom gpu.test_determinism import RACY\n"
            f"for head_dim in {head_dims}:\n"
            "    print(*digests(RACY.replace(head_dim=head_dim)), sep='\\n')\n")
    assert in_new_process(code).splitlines() == here


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_number_of_ctas(schedule, mask, head_dim):
    # A GPU with fewer SMs: bits that depend on which CTA takes which work, or a hang for want of
    # resident CTAs where a team needs them.
    case = RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim, batch=1)
    inputs = case.draw()
    expected = run(case, inputs)
    given = tuple(inputs[name] for name in "qkv") + (expected["out"], inputs["dout"],
                                                     expected["lse"], None)
    plan = dashcupy.attention_plan(*given[:3], causal=CAUSAL_OF_MASK[mask], schedule=schedule)
    for max_ctas in (1, 7, 64, 132):
        options = dict(causal=CAUSAL_OF_MASK[mask], schedule=schedule, max_ctas=max_ctas)
        if max(max_ctas // plan.config.cluster, 1) < plan.team_size:
            with pytest.raises(dashcupy.UnsupportedError, match="would hang"):
                call.run("backward", given, (None,) * 3, **options)
            continue
        grads = call.run("backward", given, (None,) * 3, **options)
        expect_same_bits(dict(zip(("dq", "dk", "dv"), grads)), expected, f"{max_ctas} CTAs")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
def test_batch_and_heads_around(schedule, mask, head_dim):
    # Order of works over the whole batch that reaches into the sums of one head.
    case = RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim)
    inputs = case.draw()
    together = run(case, inputs)
    alone = run(case, {name: x[2:3] for name, x in inputs.items()})
    expect_same_bits({name: x[2:3] for name, x in together.items()}, alone, "item 2 of 4")
    q_heads, kv_heads = slice(6, 8), slice(3, 4)
    one = run(case, {name: x[2:3, :, kv_heads if name in "kv" else q_heads]
                     for name, x in inputs.items()})
    for name, x in one.items():
        heads = kv_heads if name in ("dk", "dv") else q_heads
        part = together[name][2:3, heads] if name == "lse" else together[name][2:3, :, heads]
        expect_same_bits({name: x}, {name: part}, "heads 6, 7 of item 2")


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_late_works_of_many_heads(head_dim):
    # More heads take turns in the last block than in those before.
    case = Case(3000, 3000, batch=8, n_q_head=8, n_kv_head=8, head_dim=head_dim, mask="causal",
                schedule="longest_first")
    inputs = case.draw()
    plan = dashcupy.attention_plan(*(inputs[name] for name in "qkv"), causal=True,
                                   schedule="longest_first")
    first, schedule = head_group(plan), schedules.get("longest_first")
    late = schedules.heads_in_turn(schedule, plan.shape, 64, first, plan.shape.n_kv - 1)
    assert 1 <= first < late < 64
    together = run(case, inputs)
    for item in (0, 5):
        alone = run(case, {name: x[item:item + 1] for name, x in inputs.items()})
        expect_same_bits({name: x[item:item + 1] for name, x in together.items()}, alone,
                         f"item {item} of 8")


@pytest.mark.skipif(env.debug(), reason="debug builds wait for the GPU, which no graph allows")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask"), [
    ("auto", "causal"), ("shift", "full"), ("symmetric_shift", "causal")])
def test_cuda_graph(schedule, mask, head_dim):
    # Counters that are zeroed on the host's side of a capture, memory that a replay no longer owns,
    # launch attributes that a graph drops.
    case = RACY.replace(schedule=schedule, mask=mask, head_dim=head_dim)
    inputs = [case.replace(seed=seed).draw() for seed in (0, 1)]
    expected = [run(case, x) for x in inputs]
    fixed = {name: x.clone() for name, x in inputs[0].items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, fixed)
    for i in (0, 1, 1, 0):
        for name, x in fixed.items():
            x.copy_(inputs[i][name])
        for x in got.values():
            x.fill_(float("nan"))
        graph.replay()
        expect_same_bits(got, expected[i], f"replay with inputs {i}")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_schedules_are_told_apart(head_dim):
    # A name that is accepted and ignored. Orders of dq that are equal must give equal bits too.
    for mask in ("full", "causal"):
        names = [name for name, of in SCHEDULED if of == mask]
        dq, order = {}, {}
        for name in names:
            case = RACY.replace(schedule=name, mask=mask, head_dim=head_dim)
            inputs = case.draw()
            dq[name] = bits(run(case, inputs)["dq"])
            plan = dashcupy.attention_plan(*(inputs[x] for x in "qkv"), causal=CAUSAL_OF_MASK[mask],
                                           schedule=name)
            order[name] = _tickets(name, plan.shape)
        for a, b in itertools.combinations(names, 2):
            assert torch.equal(dq[a], dq[b]) == (order[a] == order[b]), f"{a} and {b}, {mask}"


def _tickets(name, shape):
    schedule = schedules.get(name)
    return [[schedule.ticket(shape, kv_tile, q_tile) for kv_tile in
             range(schedule.num_contributors(shape, q_tile))] for q_tile in range(shape.n_q)]


def test_digest_sees_one_bit():
    # The comparisons above would be worth nothing if a changed bit went unseen.
    case = Case(64, 64)
    got = run(case, case.draw())
    before = digest(got)
    bits(got["dk"]).view(-1)[77] ^= 1
    assert digest(got) != before
    with pytest.raises(AssertionError, match=r"dk: 1 of 8192 elements differ, first at \[0, 0, 1"):
        expect_same_bits(got, run(case, case.draw()), "one bit")
