"""Simulator: makespans known from closed forms and tables, stalls, deadlocks."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from naive_simulator import naive_steps

from dashcupy import schedules
from dashcupy.errors import InvalidInputError, UnsupportedError
from dashcupy.schedules import Shape
from dashcupy.simulate import Costs, check_resident, simulate

# Makespans of n x n tiles of m heads on n workers, step = compute 1 + add r, nothing overlaps:
# (n, m): (values for r = 0.25, values for r = 0.5), columns as in RUNS and the causal work bound.
TABLE = {
    (4, 1): ((5.75, 5, 5.75, 5, 5, 6.25, 5),
             (7.5, 6, 7.5, 6, 6, 7.5, 6)),
    (4, 2): ((10.75, 10, 10.75, 7, 8.75, 6.25, 6.25),
             (13.5, 12, 13.5, 9, 10.5, 7.5, 7.5)),
    (4, 8): ((40.75, 40, 40.75, 25.75, 27.5, 25, 25),
             (49.5, 48, 49.5, 31.5, 33, 30, 30)),
    (4, 16): ((80.75, 80, 80.75, 50.75, 52.5, 50, 50),
              (97.5, 96, 97.5, 61.5, 63, 60, 60)),
    (8, 1): ((11.75, 10, 11.75, 10, 10, 11.25, 10),
             (15.5, 12, 15.5, 12, 12, 13.5, 12)),
    (8, 2): ((21.75, 20, 21.75, 13, 16.25, 11.25, 11.25),
             (27.5, 24, 27.5, 17, 19.5, 13.5, 13.5)),
    (8, 8): ((81.75, 80, 81.75, 46.75, 50, 45, 45),
             (99.5, 96, 99.5, 57.5, 60, 54, 54)),
    (8, 16): ((161.75, 160, 161.75, 91.75, 95, 90, 90),
              (195.5, 192, 195.5, 111.5, 114, 108, 108)),
    (16, 1): ((23.75, 20, 23.75, 20, 20, 21.25, 20),
              (31.5, 24, 31.5, 24, 24, 25.5, 24)),
    (16, 2): ((43.75, 40, 43.75, 25, 32.5, 21.25, 21.25),
              (55.5, 48, 55.5, 33, 39, 25.5, 25.5)),
    (16, 8): ((163.75, 160, 163.75, 88.75, 95, 85, 85),
              (199.5, 192, 199.5, 109.5, 114, 102, 102)),
    (16, 16): ((323.75, 320, 323.75, 173.75, 181.25, 170, 170),
               (391.5, 384, 391.5, 211.5, 217.5, 204, 204)),
    (128, 1): ((191.75, 160, 191.75, 160, 160, 161.25, 160),
               (255.5, 192, 255.5, 192, 192, 193.5, 192)),
    (128, 2): ((351.75, 320, 351.75, 193, 260, 161.25, 161.25),
               (447.5, 384, 447.5, 257, 312, 193.5, 193.5)),
    (128, 8): ((1311.75, 1280, 1311.75, 676.75, 737.5, 645, 645),
               (1599.5, 1536, 1599.5, 837.5, 885, 774, 774)),
    (128, 16): ((2591.75, 2560, 2591.75, 1321.75, 1382.5, 1290, 1290),
                (3135.5, 3072, 3135.5, 1611.5, 1659, 1548, 1548)),
}
# Which CTA does what: the counter is how hardware hands out CTAs, in the order of the schedule,
# and one head after another (head_group 1) unless heads are cut into teams.
# The causal baseline pins kv tile i to worker i, so that all heads wait for the long kv tile 0.
RUNS = (("ascending", False, "counter", 1), ("shift", False, "counter", None),
        ("ascending", True, "round_robin", 1), ("descending", True, "counter", 1),
        ("shortest_first", True, "counter", 1), ("symmetric_shift", True, "counter", None))


def one_team_shift(n):
    """``shift`` on n x n tiles without its bound on the team."""
    schedule = {key: getattr(schedules.get("shift"), key)
                for key in ("num_steps", "num_work", "work_size", "kv_tile", "num_contributors")}
    return SimpleNamespace(**schedule, NAME="one_team_shift", DETERMINISTIC=True,
                           q_tile=lambda shape, kv_tile, step: (kv_tile + step) % n,
                           ticket=lambda shape, kv_tile, q_tile: (q_tile - kv_tile) % n,
                           team_size=lambda shape: n, chunk_size=lambda shape: n)


@pytest.mark.parametrize("n, m", [
    pytest.param(*key, marks=pytest.mark.slow) if key[0] * key[1] >= 1024 else key
    for key in TABLE])
def test_table_of_makespans(n, m):
    """Every digit; they are sums of quarters, so exact in binary."""
    for add, (*makespans, bound) in zip((0.25, 0.5), TABLE[n, m], strict=True):
        for (name, causal, assignment, group), makespan in zip(RUNS, makespans, strict=True):
            # A single head that fills the GPU needs one team, here larger than the bound.
            schedule = one_team_shift(n) if (name, n, m) == ("shift", 128, 1) else name
            result = simulate(schedule, Shape.from_counts(n, n, causal), m, n, Costs(reduce=add),
                              assignment=assignment, head_group=group)
            assert result.makespan == makespan, (name, causal, add)
            if causal:
                assert result.work_bound == bound


@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_closed_forms(n, stride, m):
    """One head after another."""
    add = 0.25
    full = m * stride * n * (1 + add)  # every kv tile of every head, one after another
    skew = (n - 1) * add  # the queue at the first q tile, paid once
    pairs = math.ceil(m / 2) * stride * (n + 1) * (1 + add)
    wanted = {("ascending", False, "counter"): full + skew, ("shift", False, "counter"): full,
              ("descending", False, "counter"): full + skew,
              ("ascending", True, "round_robin"): full + skew,
              ("symmetric_shift", True, "counter"): pairs,
              ("descending", True, "counter"):
                  stride * n * (1 + add) if m == 1 else full * (n + 1) / (2 * n) + skew}
    for (name, causal, assignment), makespan in wanted.items():
        shape = Shape.from_counts(stride * n, n, causal, stride)
        result = simulate(name, shape, m, n, Costs(reduce=add), assignment=assignment,
                          head_group=1)
        assert result.makespan == makespan, name


def test_odd_number_of_heads():
    """The closed forms of the causal mask hold for even counts only."""
    shape = Shape.from_counts(8, 8, causal=True)
    assert simulate("descending", shape, 5, 8, head_group=1).makespan == 32.5
    assert simulate("symmetric_shift", shape, 5, 8, head_group=1).makespan == 33.75


@pytest.mark.parametrize("name", ["ascending", "descending", "shortest_first"])
@pytest.mark.parametrize("head_group, queue", [(1, 3), (2, 1), (4, 0), (None, 0)])
def test_heads_side_by_side_shorten_the_queue(name, head_group, queue):
    """4 kv tiles of 4 heads on 4 CTAs, which queue only for those on the same head."""
    result = simulate(name, Shape.from_counts(4, 4), 4, 4, Costs(1.0, 0.25),
                      head_group=head_group)
    assert result.makespan == 4 * 4 * 1.25 + queue * 0.25


def test_one_hand_off_by_hand():
    """Two kv tiles, one q tile: the second waits for the add and the latency of the first."""
    result = simulate("ascending", Shape.from_counts(1, 2), 1, 2, Costs(2.0, 0.5, 0.25))
    first, second = result.steps
    assert (first.reduce_start, first.reduce_end) == (2.0, 2.5)
    assert (second.worker, second.compute_end, second.reduce_start) == (1, 2.0, 2.75)
    assert (result.makespan, result.stall, result.idle) == (3.5, [0.0, 0.75], [0.75, 0.0])
    free = simulate("ascending", Shape.from_counts(1, 2), 1, 2, Costs(2.0, 0.5, ordered=False))
    assert (free.makespan, free.stall) == (2.5, [0.0, 0.0])


@pytest.mark.parametrize("slots, writer, makespan", [
    (0, "serial", 64 * 2.125), (0, "pipelined", 64 * 2.125),  # nothing overlaps
    (1, "serial", 1 + 64 * 1.125), (2, "serial", 1 + 64 * 1.125),  # one hop a step at best
    (1, "pipelined", 64 + 1.125)])  # hops overlap: only the last one shows
def test_what_overlaps(slots, writer, makespan):
    """A hop (0.5 + 0.625) longer than a step: only a pipelined adder hides it."""
    costs = Costs(1.0, 0.5, 0.625, slots, writer)
    # Each row is met again two steps later, so no kv tile waits for another.
    result = simulate("shift", Shape.from_counts(16, 8), 4, 8, costs)
    assert result.makespan == makespan
    assert result.work_bound == 64 * {0: 2.125}.get(slots, 1.125 if writer == "serial" else 1.0)


def test_team_cut_in_chunks_pays_for_a_late_second_team():
    """More kv tiles than a team holds: the second team follows the first row by row."""
    shape = Shape.from_counts(128, 128)
    assert simulate("shift", shape, 1, 128).makespan == 317.75
    assert simulate("shift", shape, 2, 128).makespan == 320.0  # of two heads each: no loss
    assert simulate("shift", shape, 2, 128, head_group=1).makespan == 320.0  # teams never mix


def test_longest_first_leaves_short_works_to_the_end():
    """What it is for: no queue as in `descending`, no CTA left alone with a long work."""
    shape = Shape.from_counts(128, 64, causal=True, stride=2)
    costs = Costs(1.0, 0.2, 2.0, 2, "pipelined")
    efficiency = {name: simulate(name, shape, 32, 132, costs, head_group=8).efficiency
                  for name in ("descending", "shortest_first", "longest_first")}
    assert efficiency["descending"] < 0.85 < efficiency["shortest_first"] < 0.94
    assert efficiency["longest_first"] > 0.97
    # A head alone has nobody to come in between its blocks.
    alone = {name: simulate(name, shape, 1, 132, costs).makespan for name in efficiency}
    assert alone["longest_first"] > 1.5 * alone["shortest_first"]


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("slots, writer", [(0, "serial"), (1, "serial"), (2, "pipelined")])
def test_times_of_a_run_fit_together(name, slots, writer):
    costs = Costs(1.0, 0.375, 0.5, slots, writer)
    causal = "causal" in schedules.get(name).MASKS
    shape = Shape.from_counts(9, 6, causal, 2)
    result = simulate(name, shape, 3, 7, costs, q_per_kv=2)
    for parts in zip(result.busy, result.stall, result.idle, strict=True):
        assert sum(parts) == pytest.approx(result.makespan) and min(parts) >= 0
    assert result.makespan >= result.work_bound and 0 < result.efficiency <= 1
    pairs = sum(map(shape.num_kv_tiles, range(shape.n_q)))
    assert len(result.steps) == 3 * 2 * pairs
    sums, workers = {}, {}
    for step in result.steps:
        sums.setdefault((step.head, step.q_head, step.q_tile), []).append(step)
        workers.setdefault(step.worker, []).append(step)
    for steps in sums.values():  # one add after another, in ticket order
        steps.sort(key=lambda step: step.ticket)
        assert all(b.reduce_start >= a.reduce_end + costs.latency
                   for a, b in zip(steps, steps[1:], strict=False))
    for steps in workers.values():
        assert all(b.compute_start >= a.compute_end and b.reduce_start >= a.reduce_end
                   for a, b in zip(steps, steps[1:], strict=False))


@given(name=st.sampled_from(schedules.names()), n_q=st.integers(1, 6), n_kv=st.integers(1, 6),
       stride=st.integers(1, 2), extra=st.integers(0, 3),
       heads=st.sampled_from([(1, 1), (3, 1), (3, 2), (3, 3), (9, 1), (7, 2)]),
       times=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
       slots=st.integers(0, 3), writer=st.sampled_from(["serial", "pipelined"]),
       assignment=st.sampled_from(["counter", "round_robin"]))
# Hung when a CTA took its next work with a part of the last still in a slot.
@example(name="shift", n_q=1, n_kv=3, stride=1, heads=(3, 3), extra=0, times=(1, 1, 0), slots=1,
         writer="serial", assignment="counter")
def test_equals_a_clock(name, n_q, n_kv, stride, heads, extra, times, slots, writer, assignment):
    """The simulator has no clock; one that looks at every tick must see the same run."""
    schedule = schedules.get(name)
    shape = Shape.from_counts(n_q, n_kv, "causal" in schedule.MASKS, stride)
    costs = Costs(*times, slots, writer)
    n_worker = schedule.team_size(shape) + extra
    n_head, head_group = heads
    result = simulate(schedule, shape, n_head, n_worker, costs, assignment=assignment,
                      head_group=head_group)
    if not result.deadlock:  # round robin may hang where the counter cannot
        assert sorted(result.steps) == naive_steps(schedule, shape, n_head, n_worker, costs,
                                                   assignment, head_group)
    else:
        assert assignment == "round_robin"


def test_cycle_is_named():
    """Two kv tiles that each wait for the other hang on any number of CTAs."""
    crossed = SimpleNamespace(**vars(schedules.get("ascending")))
    # kv tile 1 goes first on q tile 0, kv tile 0 on q tile 1: harmless while both go 0, 1.
    crossed.ticket = lambda shape, kv_tile, q_tile: kv_tile ^ (q_tile == 0)
    assert not simulate(crossed, Shape.from_counts(2, 2), 1, 2).deadlock
    crossed.q_tile = lambda shape, kv_tile, step: step ^ kv_tile
    result = simulate(crossed, Shape.from_counts(2, 2), 1, 2)
    assert result.makespan == math.inf
    assert result.deadlock == (
        "CTA 0 (head 0, kv tile 0) waits on q tile 0 for kv tile 1, "
        "CTA 1 (head 0, kv tile 1) waits on q tile 1 for kv tile 0, and CTA 0 stands above")
    with pytest.raises(UnsupportedError, match="50 resident CTAs would hang: CTA 0"):
        check_resident(crossed, Shape.from_counts(2, 2), 1, 50)


def test_bad_arguments_are_refused():
    shape = Shape.from_counts(2, 2)
    for wrong, said in (({"compute": -1}, "compute=-1"), ({"latency": math.nan}, "latency=nan"),
                        ({"slots": 0.5}, "whole number"), ({"writer": "fast"}, "serial, pipel")):
        with pytest.raises(InvalidInputError, match=said):
            Costs(**wrong)
    with pytest.raises(InvalidInputError, match="n_worker=0"):
        simulate("shift", shape, 1, 0)
    for wrong in (0, 4):
        with pytest.raises(InvalidInputError, match=f"head_group={wrong}: must be 1 to n_head=3"):
            simulate("shift", shape, 3, 2, head_group=wrong)
    with pytest.raises(InvalidInputError, match="counter, round_robin"):
        simulate("shift", shape, 1, 1, assignment="random")
    with pytest.raises(InvalidInputError, match="not defined for the causal mask"):
        simulate("shift", Shape.from_counts(2, 2, causal=True), 1, 2)
    assert simulate("shift", Shape.from_counts(0, 2), 1, 2).makespan == 0.0


def test_nobody_waits_for_a_turn_without_an_order():
    """With turns `schedule unordered` looked slower than any order that it is there to price."""
    for shape in (Shape.from_counts(8, 8), Shape.from_counts(8, 8, causal=True)):
        result = simulate("unordered", shape, 2, 8)
        assert not result.deadlock and result.stall == [0.0] * 8
        assert simulate("descending", shape, 2, 8, head_group=1).makespan > result.makespan
