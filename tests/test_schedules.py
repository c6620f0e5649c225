"""Schedules in Python: every pair once, tickets without a gap, no deadlock, clear refusals."""

import hashlib
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest
from schedule_grid import all_shapes, shapes

from dashcupy import schedules
from dashcupy.errors import InvalidInputError, UnsupportedError
from dashcupy.plan import NUMERICS_VERSION
from dashcupy.schedules import Shape, contract, order
from dashcupy.simulate import check_resident

FULL = Shape.from_counts(6, 6)
CAUSAL = Shape.from_counts(6, 6, causal=True)
ALL = (*schedules.names(), "unordered")


def visible_tiles(shape):
    """[n_q, n_kv] bool from the mask itself, row by row and key by key."""
    rows, keys = np.arange(shape.q_len)[:, None], np.arange(shape.kv_len)
    seen = np.zeros((shape.n_q * shape.q_rows, shape.n_kv * shape.kv_rows), bool)
    seen[:shape.q_len, :shape.kv_len] = (keys <= rows + shape.offset) | (not shape.causal)
    return seen.reshape(shape.n_q, shape.q_rows, shape.n_kv, shape.kv_rows).any((1, 3))


@pytest.mark.parametrize("causal", [False, True])
def test_tile_bounds_agree_with_the_mask(causal):
    for tiles in ((4, 4), (4, 12), (8, 4), (6, 4)):
        for shape in shapes(*tiles, causal):
            seen = visible_tiles(shape)
            first = [int(np.argmax(column)) if column.any() else shape.n_q for column in seen.T]
            assert [shape.first_q_tile(kv) for kv in range(shape.n_kv)] == first, shape
            # The visible kv tiles of a row of tiles are a prefix: a count says it all.
            count = seen.sum(1)
            assert (seen == (np.arange(shape.n_kv) < count[:, None])).all(), shape
            assert [shape.num_kv_tiles(q) for q in range(shape.n_q)] == count.tolist(), shape
            assert shape.num_active_kv_tiles() == seen.any(0).sum(), shape


@pytest.mark.parametrize("name", ALL)
def test_every_pair_once_and_tickets_without_a_gap(name):
    """A pair missed or done twice is a wrong gradient; a gap in the tickets is a hang."""
    schedule = schedules.get(name)
    for shape in all_shapes(schedule.MASKS):
        kv_tiles = [schedule.kv_tile(shape, work, part)
                    for work in range(schedule.num_work(shape))
                    for part in range(schedule.work_size(shape, work))]
        assert sorted(kv_tiles) == list(range(shape.n_kv)), shape
        turns = np.full((shape.n_q, shape.n_kv), -1)
        for kv in kv_tiles:
            for step in range(schedule.num_steps(shape, kv)):
                q = schedule.q_tile(shape, kv, step)
                assert turns[q, kv] == -1, (shape, "twice", q, kv)
                turns[q, kv] = schedule.ticket(shape, kv, q)
        assert ((turns >= 0) == visible_tiles(shape)).all(), shape
        for q, row in enumerate(turns):
            count = schedule.num_contributors(shape, q)
            assert sorted(row[row >= 0]) == list(range(count)), (shape, q)


# Of numerics version 4: a digest of the order in which each schedule adds, over the grid of shapes.
ORDERS = {"ascending": "b6993e28bc8870e3", "descending": "0689813e4da27708",
          "longest_first": "9d628d30d903e69f", "shift": "7b4e2e47fe3eaf26",
          "shortest_first": "da43c6a2c7923fa1", "symmetric_shift": "015d7b4bb727389c"}


def test_another_order_of_a_sum_is_another_numerics_version():
    """Equal fingerprints promise equal bits: longest_first once got other blocks under one number.

    A new schedule gets a line in ORDERS. Where that of an old one changes on purpose, raise the
    number, too.
    """
    def digest(schedule):
        found = hashlib.sha256()
        for shape in all_shapes(schedule.MASKS):
            orders = [[(q, schedule.ticket(shape, kv, q)) for q in (
                schedule.q_tile(shape, kv, step) for step in range(schedule.num_steps(shape, kv)))]
                for kv in range(shape.n_kv)]
            found.update(f"{shape} {orders}\n".encode())
        return found.hexdigest()[:16]
    assert NUMERICS_VERSION == 4
    assert {name: digest(schedules.get(name)) for name in schedules.names()} == ORDERS


@pytest.mark.parametrize("name", schedules.names())
def test_no_deadlock(name):
    """With the fewest CTAs allowed, with one more, or with one for every work of all heads."""
    schedule = schedules.get(name)
    settings = itertools.cycle(itertools.product((1, 2, 3), (1, 2), (0, 1, 2)))
    n_head = 9 if name == "longest_first" else 3  # late chunks have other groups
    for shape, (head_group, q_per_kv, few) in zip(all_shapes(schedule.MASKS), settings):
        team, n_work = schedule.team_size(shape), schedule.num_work(shape)
        assert 1 <= team <= order.MAX_TEAM and schedule.chunk_size(shape) >= team, shape
        n_resident = (team, team + 1, max(team, n_head * n_work))[few]
        check_resident(schedule, shape, n_head, n_resident, q_per_kv, head_group)


@pytest.mark.parametrize("name, shape", [("shift", FULL), ("symmetric_shift", CAUSAL)])
def test_team_needs_all_of_itself(name, shape):
    """The stated team is not merely enough: one CTA fewer hangs, and is refused beforehand."""
    team = schedules.get(name).team_size(shape)
    schedules.require_resident(name, shape, team)
    with pytest.raises(UnsupportedError, match="waits on q tile . for .* which no CTA has taken"):
        check_resident(name, shape, 2, team - 1)
    with pytest.raises(UnsupportedError, match=f"needs {team} CTAs .* only {team - 1} fit"):
        schedules.require_resident(name, shape, team - 1)


@pytest.mark.parametrize("shape", [FULL, CAUSAL])
def test_launch_ordered_schedules_need_one_cta(shape):
    only_causal = ("longest_first",) if shape.causal else ()
    for name in ("ascending", "descending", "shortest_first", "auto", *only_causal):
        schedules.require_resident(name, shape, 1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_head, head_group", [(1, 1), (5, 1), (5, 2), (5, 3), (5, 5), (10, 1),
                                                (13, 1), (13, 2)])
def test_work_order(name, n_head, head_group):
    """Every work of every head once; heads keep the order of the schedule; teams stay together."""
    schedule = schedules.get(name)
    late_group = {(10, 1): 3, (13, 1): 3, (13, 2): 4}.get((n_head, head_group), head_group)
    for shape in all_shapes(schedule.MASKS):
        n_work, chunk = schedule.num_work(shape), schedule.chunk_size(shape)
        is_team = schedule.team_size(shape) > 1

        def rank(place, n_work=n_work, chunk=chunk, is_team=is_team):
            head, work = place
            is_late = work // chunk * chunk * 2 >= n_work
            in_turn = 1 if is_team else late_group if is_late else head_group
            return work // chunk, head // in_turn, work, head
        wanted = sorted(itertools.product(range(n_head), range(n_work)), key=rank)
        taken = [schedules.decode(schedule, shape, n_head, number, head_group)
                 for number in range(schedules.total_work(schedule, shape, n_head))]
        assert taken == wanted, shape
        if head_group == n_head:  # the default
            assert taken == [schedules.decode(schedule, shape, n_head, number)
                             for number in range(len(taken))]


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("head_group", [1, 2, 3, 10])
def test_teams_are_handed_out_in_a_row(name, head_group):
    """Works of others in between would take the CTAs that the team waits for."""
    schedule = schedules.get(name)
    for shape in all_shapes(schedule.MASKS):
        team = schedule.team_size(shape)
        total = schedules.total_work(schedule, shape, 10)
        number_of = {schedules.decode(schedule, shape, 10, number, head_group): number
                     for number in range(total)}
        for (head, work), number in number_of.items():
            if work % team:
                assert number == number_of[head, work - 1] + 1, (shape, head, work)


@pytest.mark.parametrize("name", ALL)
def test_schedule_knows_only_the_shape(name):
    """Batch, heads or SM count in a signature would make bits depend on them."""
    schedule = schedules.get(name)
    wanted = {key: [p for p in inspect.signature(function).parameters if p != "self"]
              for key, function in vars(contract.Schedule).items()
              if inspect.isfunction(function) and not key.startswith("_")}
    assert len(wanted) == 9
    for key, parameters in wanted.items():
        assert list(inspect.signature(getattr(schedule, key)).parameters) == parameters, key
    assert schedule.NAME == name and set(schedule.MASKS) <= {"full", "causal"}
    assert schedule.DESCRIPTION and "\n" not in schedule.DESCRIPTION


def test_chunks_are_few_and_even():
    assert [order.balanced_chunk(n) for n in (0, 1, 64, 65, 128, 129, 130, 192)] == [
        1, 1, 64, 33, 64, 43, 44, 64]


def test_registry_finds_every_module():
    """A schedule is two files: nothing else has to be told."""
    folder = Path(schedules.__file__).parent
    helpers = {"__init__", "auto", "contract", "order", "shape"}
    assert set(ALL) == {path.stem for path in folder.glob("*.py")} - helpers
    assert schedules.names() == ("ascending", "descending", "longest_first", "shift",
                                 "shortest_first", "symmetric_shift")


def test_unordered_is_only_for_who_asks_for_it():
    """It is not deterministic: in a list of choices, or as the meaning of auto, it would be a
    broken promise."""
    assert not schedules.get("unordered").DETERMINISTIC
    assert "unordered" not in schedules.names()
    assert all(schedules.get(name).DETERMINISTIC for name in schedules.names())
    assert {schedules.resolve("auto", shape).NAME for shape in (FULL, CAUSAL)} <= set(
        schedules.names())


def test_unknown_name_says_which_is_meant():
    with pytest.raises(InvalidInputError, match="allowed: auto, ascending, .*mean 'shift'"):
        schedules.get("shfit")
    with pytest.raises(InvalidInputError, match=r"allowed: .*symmetric_shift\)$"):
        schedules.get("zzz")
    with pytest.raises(InvalidInputError, match="schedule=None is not known"):
        schedules.get(None)


def test_mask_that_a_schedule_lacks_is_refused():
    with pytest.raises(InvalidInputError, match="'shift' is not defined for the causal mask .*"
                                                "for causal use .*'symmetric_shift'"):
        schedules.resolve("shift", CAUSAL)
    with pytest.raises(InvalidInputError, match="not defined for the full mask .*use .*'shift'"):
        schedules.resolve("symmetric_shift", FULL)
    assert schedules.supports("symmetric_shift", "causal_top_left")
    assert not schedules.supports("shift", "causal_top_left")
    with pytest.raises(InvalidInputError, match="mask 'diagonal' is not known"):
        schedules.supports("shift", "diagonal")


@pytest.mark.parametrize("n_kv", [1, 3, 4, 15, 16, 17, 24, 25, 27, 28, 31, 32, 33, 35, 36, 41, 42,
                                  43, 47, 48, 62, 63, 64, 65, 96, 123, 124, 128, 129, 256, 257])
@pytest.mark.parametrize("kernel, full_team, team, longest, else_causal", [
    ("", range(0), range(0), range(0), "descending"),
    ("bwd_sm90_d64", range(0), range(0), range(48, 257), "shortest_first"),
    ("bwd_sm90", range(16, 129), range(32, 129), range(32, 257), "descending"),
    ("bwd_sm90_d192", range(0), range(4, 25), range(28, 257), "shortest_first"),
    ("bwd_sm90_d256", range(16, 129), range(0), range(36, 257), "shortest_first")])
def test_auto_of_each_kernel(n_kv, kernel, full_team, team, longest, else_causal):
    """A team only where the kernel gains from one, and where some of them fill a GPU: with 48 works
    to a team a fifth was lost at 12,288 rows. All others must run on any GPU.
    """
    full, causal = (Shape.from_counts(2 * n_kv, n_kv, mask, 2) for mask in (False, True))

    def fills(count):
        size = -(-count // -(-count // 64))  # balanced teams of at most 64
        return size <= 16 or size in (21, 31, 32, 62, 63, 64)

    for shape, wanted in (
            (full, "shift" if n_kv in full_team and fills(n_kv) else "ascending"),
            (causal, "symmetric_shift" if n_kv in team and fills(-(-n_kv // 2)) else
             "longest_first" if n_kv in longest else else_causal)):
        chosen = schedules.resolve("auto", shape, kernel)
        assert chosen.NAME == wanted
        assert "shift" in wanted or chosen.team_size(shape) == 1


@pytest.mark.parametrize("n_q, full, causal", [
    (2, "ascending", "shortest_first"), (31, "ascending", "symmetric_shift"),
    (62, "ascending", "symmetric_shift"), (63, "shift", "symmetric_shift")])
def test_auto_of_few_q_tiles(n_q, full, causal):
    """32 kv tiles that meet on few q tiles queue: 0.96 instead of 0.30 ms, 1024 rows, 8192 keys."""
    shape = Shape.from_counts(n_q, 32, False, stride=2)
    assert schedules.resolve("auto", shape, "bwd_sm90").NAME == full
    shape = Shape.from_counts(n_q, 4, True, stride=2)
    assert schedules.resolve("auto", shape, "bwd_sm90_d192").NAME == causal


@pytest.mark.parametrize("kernel", ["bwd_sm90", "bwd_sm90_d64"])
def test_auto_of_q_heads_that_share_a_kv_head(kernel):
    """Measured with 4 of them, 4096 rows: 1.36 instead of 1.17 ms (128, causal), 1.85 instead of
    1.26 (64, causal), 2.46 instead of 2.08 (128, full).
    """
    shape = Shape.from_counts(64, 32, True, stride=2)
    alone = schedules.resolve("auto", shape, kernel, 1).NAME
    assert alone != schedules.resolve("auto", shape, kernel, 4).NAME == "descending"
    full = Shape.from_counts(64, 32, False, stride=2)
    assert schedules.resolve("auto", full, kernel, 4).NAME == "ascending"
