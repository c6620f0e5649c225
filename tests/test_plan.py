"""Plans: pure, complete, linear in memory, and with a fingerprint of what bits depend on."""

import dataclasses
import itertools

import pytest

from dashcupy import params, plan_sm90, schedules
from dashcupy.errors import InvalidInputError, UnsupportedError
from dashcupy.plan import head_group, make_plan
from dashcupy.plan_backward import SEMAPHORE_STRIDE
from dashcupy.problem import Problem

H200, B200 = (9, 0), (10, 0)  # with the Hopper and with the portable kernels
ONE_WORK = {"q_len": 1, "kv_len": 1, "n_q_head": 1, "n_kv_head": 1}  # for each sequence


def problem(**changes):
    values = dict(batch=2, q_len=1000, kv_len=900, n_q_head=4, n_kv_head=2, head_dim=128,
                  dtype="bfloat16", mask="causal", scale=0.125)
    return Problem(**(values | changes))


def kernel(plan, name):
    return next(kernel for kernel in plan.kernels if kernel.kernel == name)


def defines(plan, name):
    return dict(kernel(plan, name).defines)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["cpu", H200])
@pytest.mark.parametrize("changes", [{"batch": 9}, {"n_q_head": 64, "n_kv_head": 1}])
def test_fingerprint_ignores_batch_and_heads(direction, target, changes):
    """Equal bits in another batch are promised, and found by comparing fingerprints."""
    base = make_plan(problem(), direction, target)
    assert make_plan(problem(**changes), direction, target).fingerprint == base.fingerprint


@pytest.mark.parametrize("changes", [
    {"q_len": 1001}, {"kv_len": 901}, {"head_dim": 120}, {"dtype": "float16"},
    {"mask": "full"}, {"mask": "causal_top_left"}, {"scale": 0.125000001}])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fingerprint_names_the_problem(direction, changes):
    """Equal fingerprints promise equal bits, so whatever changes them must be named."""
    base = make_plan(problem(), direction, H200)
    assert make_plan(problem(**changes), direction, H200).fingerprint != base.fingerprint


def test_fingerprint_names_schedule_tiles_capability_and_direction():
    """As above, for what the package chooses."""
    prints = {make_plan(problem(), "backward", target, name).fingerprint
              for name in ("ascending", "descending", "symmetric_shift")
              for target in (H200, (8, 0), (8, 9), "cpu")}
    prints |= {make_plan(problem(), "forward", target).fingerprint for target in (H200, (8, 0))}
    assert len(prints) == 14
    assert ":fwd_sm90[128x128]:cc9.0" in make_plan(problem(), "forward", H200).fingerprint


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_auto_has_the_bits_of_the_schedule_it_picks(mask):
    """\"auto\" is a name for a schedule and no schedule of its own."""
    auto = make_plan(problem(mask=mask), "backward", H200, "auto")
    named = make_plan(problem(mask=mask), "backward", H200, auto.schedule)
    assert auto.fingerprint == named.fingerprint and auto.kernels == named.kernels
    assert auto.requested_schedule == "auto" and named.requested_schedule == auto.schedule


def test_q_heads_that_share_a_kv_head_have_the_bits_of_repeated_ones_under_one_name():
    """With "auto" they need not: it picks by that."""
    plans = {(name, n): make_plan(problem(head_dim=64, n_kv_head=n), "backward", H200, name)
             for name in ("auto", "descending", "shortest_first") for n in (1, 4)}
    same = {name: plans[name, 1].fingerprint == plans[name, 4].fingerprint for name, _ in plans}
    assert same == {"auto": False, "descending": True, "shortest_first": True}


def test_alignment_and_debugging_change_the_build_and_not_the_bits():
    """The promise covers strides and alignment."""
    base = make_plan(problem(), "backward", B200)
    other = make_plan(problem(), "backward", B200, "auto", False, True)
    assert other.fingerprint == base.fingerprint
    for plan, aligned, debug in ((base, 1, 0), (other, 0, 1)):
        assert defines(plan, "bwd_sm80")["DC_ALIGNED"] == aligned
        assert defines(plan, "bwd_sm80")["DC_DEBUG"] == debug
        assert defines(plan, "bwd_preprocess")["DC_ALIGNED"] == aligned


def group_of(asked, target, schedule):
    return head_group(make_plan(asked, "backward", target, schedule))


@pytest.mark.parametrize("target", [B200, H200])
@pytest.mark.parametrize("schedule", ["ascending", "longest_first"])
def test_head_group(target, schedule):
    """The work order divides by it and never asks whether a group is larger than all heads."""
    mask = "full" if schedule == "ascending" else "causal"

    def group(**changes):
        return group_of(problem(head_dim=128, mask=mask, **changes), target, schedule)

    groups = [group(batch=64, kv_len=kv_len) for kv_len in (0, 1, 100, 900, 1 << 14)]
    assert groups == sorted(groups, reverse=True) and groups[0] == 64 * 2
    least = 2 if schedule == "ascending" else 1
    assert least <= groups[-1] < 64 * 2  # long heads: not all at a time
    if target == H200:  # what two of the longest need just fits L2
        longest = [group(batch=64, kv_len=1 << n) for n in (16, 20)]
        assert longest == [least, 1]
    assert group(n_kv_head=1, batch=1) == 1
    assert group(batch=0) == 1


def test_a_team_has_its_head_alone():
    """Works of other heads in between would take the CTAs that it waits for."""
    for target, schedule, mask in itertools.product(
            (B200, H200), ("shift", "symmetric_shift"), ("full", "causal")):
        if schedules.supports(schedule, mask):
            asked = problem(q_len=1024, kv_len=1024, batch=8, mask=mask)
            assert group_of(asked, target, schedule) == 1
            lone = problem(q_len=64, kv_len=64, batch=8, mask=mask)  # a team of one
            assert group_of(lone, target, schedule) > 1


@pytest.mark.parametrize("kv_len, mask, n_kv_head, schedule", [
    (16384, "full", 4, "shift"), (16385, "full", 4, "ascending"), (1920, "full", 4, "ascending"),
    (4480, "causal", 4, "shortest_first"), (4481, "causal", 4, "longest_first"),
    (12288, "full", 4, "ascending"),
    (32768, "causal", 4, "longest_first"), (32769, "causal", 4, "shortest_first"),
    (4096, "full", 2, "ascending"), (16384, "causal", 2, "descending")])
def test_auto_of_wide_heads(kv_len, mask, n_kv_head, schedule):
    """Where a head is a team or two, teams gain; where q heads share a kv head they cost a tenth
    with the full mask, and more with the causal one.
    """
    asked = problem(q_len=kv_len, kv_len=kv_len, mask=mask, head_dim=256, n_kv_head=n_kv_head)
    plan = make_plan(asked, "backward", H200)
    assert (plan.schedule, plan.config.kernel) == (schedule, "bwd_sm90_d256")
    least = 2 if schedule in ("shortest_first", "descending") else 1
    rows = 1 if schedule == "shift" else 2**14
    assert head_group(plan) == min(2 * n_kv_head, max(least, rows // kv_len))


@pytest.mark.parametrize("kv_len, mask, n_kv_head, schedule", [
    (288, "causal", 4, "shortest_first"), (289, "causal", 4, "symmetric_shift"),
    (2304, "causal", 4, "symmetric_shift"), (2305, "causal", 4, "shortest_first"),
    (2592, "causal", 4, "shortest_first"), (2593, "causal", 4, "longest_first"),
    (6144, "causal", 4, "longest_first"), (12288, "causal", 4, "longest_first"),
    (24576, "causal", 4, "longest_first"), (24577, "causal", 4, "shortest_first"),
    (4096, "full", 4, "ascending"), (4096, "causal", 2, "descending")])
def test_auto_at_head_dim_192(kv_len, mask, n_kv_head, schedule):
    """Teams gain where heads are short; larger ones idle in their last round, by up to 13 %."""
    asked = problem(q_len=kv_len, kv_len=kv_len, mask=mask, head_dim=192, n_kv_head=n_kv_head)
    plan = make_plan(asked, "backward", H200)
    assert (plan.schedule, plan.config.kernel) == (schedule, "bwd_sm90_d192")
    rows = 1 if schedule == "symmetric_shift" else 2**14
    assert head_group(plan) == min(2 * n_kv_head, max(1, rows // kv_len))


def test_the_hopper_backward_keeps_its_heads_in_l2():
    """With groups as large as the portable kernel's it waited for memory: 1.98 instead of 1.29 ms
    at 2048 rows, full mask."""
    asked = problem(head_dim=128, batch=64, kv_len=2048)
    rows = {target: group_of(asked, target, "ascending") * 2048 for target in (B200, H200)}
    assert rows == {B200: 2**17, H200: 2**15}
    for kv_len in (512, 1 << 14):
        asked = problem(head_dim=64, batch=64, kv_len=kv_len)
        assert group_of(asked, H200, "ascending") * kv_len == 2**15


@pytest.mark.parametrize("head_dim, mask, schedule, groups", [
    (64, "full", "ascending", (8, 4, 3, 2, 1)), (64, "causal", "shortest_first", (8, 4, 2, 1, 1)),
    (64, "causal", "longest_first", (12, 6, 3, 1, 1)),
    (192, "full", "ascending", (4, 2, 2, 1, 1)), (192, "causal", "longest_first", (4, 2, 1, 1, 1))])
def test_heads_of_long_sequences(head_dim, mask, schedule, groups):
    """Measured: one head fewer or more costs 0.5 % (64) or 3 % (192) at 16,384 rows."""
    found = tuple(group_of(problem(head_dim=head_dim, batch=64, kv_len=1 << n, mask=mask), H200,
                           schedule) for n in range(12, 17))
    assert found == groups


@pytest.mark.parametrize("batch, late", [(16, ", 9 where works"), (8, ", 5 where"), (4, ":")])
def test_explain_tells_who_takes_turns_late(batch, late):
    """Three times as many heads, but no more than a third of all."""
    plan = make_plan(problem(head_dim=64, batch=batch, kv_len=1 << 14), "backward", H200,
                     "longest_first")
    assert f" 3 of the {2 * batch} kv heads take turns as works are handed out{late}" in (
        plan.explain())


@pytest.mark.parametrize("target", ["cpu", B200])
def test_unordered_is_refused_where_no_kernel_has_it(target):
    """Running some order instead would measure the wrong thing."""
    message = "'unordered' runs on the Hopper backwards only .* use 'auto'"
    with pytest.raises(UnsupportedError, match=message):
        make_plan(problem(), "backward", target, "unordered")


def test_unordered_promises_no_bits():
    """Equal fingerprints promise equal bits; adds that nobody orders cannot."""
    plan = make_plan(problem(), "backward", H200, "unordered")
    assert plan.fingerprint.endswith(":not-deterministic")
    for name in ("bwd_preprocess", "bwd_sm90"):
        assert defines(plan, name)["DC_UNORDERED"] == 1
    ordered = make_plan(problem(), "backward", H200)
    assert defines(ordered, "bwd_sm90")["DC_UNORDERED"] == 0
    assert "not-deterministic" not in ordered.fingerprint


def test_forward_launch():
    """Grid, threads and defines of the contract with fwd_sm80."""
    plan = make_plan(problem(), "forward", (8, 0))
    launch, config = kernel(plan, "fwd_sm80"), plan.config
    assert launch.grid == -(-1000 // config.q_tile) * 2 * 4
    assert launch.threads == 32 * config.n_warp and launch.smem_bytes == config.smem_bytes
    expected = {
        "DC_HEAD_DIM": 128, "DC_HEAD_DIM_PAD": 128, "DC_Q_TILE": config.q_tile,
        "DC_KV_TILE": config.kv_tile, "DC_WARPS": config.n_warp, "DC_CAUSAL": 1, "DC_BF16": 1,
        "DC_ALIGNED": 1, "DC_PARAMS_BYTES": params.n_bytes("forward"),
        "DC_SMEM_BYTES": config.smem_bytes}
    assert expected.items() <= defines(plan, "fwd_sm80").items()
    assert plan.workspace_bytes == 0 and plan.schedule is None


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_forward_launch_of_hopper(mask):
    """Grid, threads and defines of the contract with fwd_sm90."""
    plan = make_plan(problem(mask=mask), "forward", H200, "auto", True, True)
    (launch,), config = plan.kernels, plan.config
    assert launch.kernel == "fwd_sm90" and launch.params == "forward_sm90" and launch.persistent
    assert launch.grid == 8 * 2 * 4 and launch.threads == 384 and not launch.cooperative
    assert launch.counter == (mask == "causal") and launch.smem_bytes == config.smem_bytes
    assert dict(launch.defines) == {
        "DC_HEAD_DIM": 128, "DC_HEAD_DIM_PAD": 128, "DC_Q_TILE": 128, "DC_KV_TILE": 128,
        "DC_CAUSAL": int(mask == "causal"), "DC_BF16": 1, "DC_CONSUMERS": 2, "DC_STAGES": 2,
        "DC_Q_STAGES": 3 if mask == "causal" else 2, "DC_EARLY_EXPONENTIALS": 32,
        "DC_FIXED_REFERENCE": 1, "DC_DEBUG": 1,
        "DC_PARAMS_BYTES": params.n_bytes("forward_sm90"), "DC_SMEM_BYTES": config.smem_bytes}
    assert plan.workspace_bytes == 0 and plan.schedule is None and plan.cleared == ()


def test_copies_change_the_launches_and_not_the_bits():
    """Tensor maps cannot describe every array; the promise covers strides and alignment."""
    base, plan = (make_plan(problem(), "forward", H200, "auto", aligned)
                  for aligned in (True, False))
    assert plan.fingerprint == base.fingerprint and plan.kernels[3] == base.kernels[0]
    assert [kernel.copies for kernel in plan.kernels] == [
        ("q", "q_copy"), ("k", "k_copy"), ("v", "v_copy"), None, ("out_copy", "out")]
    copy = plan.kernels[0]
    assert copy.kernel == "copy_rows" and copy.grid == 2 * 1000 * 4 // 8 and copy.threads == 256
    assert {region.name: region.n_bytes for region in plan.workspace} == {
        "q_copy": 2 * 2 * 1000 * 4 * 128, "k_copy": 2 * 2 * 900 * 2 * 128,
        "v_copy": 2 * 2 * 900 * 2 * 128, "out_copy": 2 * 2 * 1000 * 4 * 128}
    assert all(region.offset % 256 == 0 for region in plan.workspace)
    assert "loads by tensor map of copies" in plan.explain()
    no_keys = make_plan(problem(kv_len=0), "forward", H200, "auto", False)
    assert [region.name for region in no_keys.workspace] == ["q_copy", "out_copy"]
    assert len(no_keys.kernels) == 3


def test_forward_head_group():
    """The kernel divides by it; with GQA a group holds whole kv heads."""
    assert plan_sm90.head_group(problem(batch=0)) == plan_sm90.head_group(problem(kv_len=0,
                                                                                  batch=0)) == 1
    assert plan_sm90.head_group(problem(batch=64, kv_len=0)) == 64 * 4
    long = problem(batch=64, kv_len=1 << 20, n_q_head=32, n_kv_head=4)
    assert plan_sm90.head_group(long) == 8
    assert plan_sm90.head_group(problem(batch=64, kv_len=1 << 14)) == 4


def test_backward_launches():
    """Grid, threads and defines of the contract with bwd_preprocess and bwd_sm80."""
    plan = make_plan(problem(), "backward", B200, "shortest_first")
    before, main, config = *plan.kernels, plan.config
    assert (before.kernel, main.kernel) == ("bwd_preprocess", "bwd_sm80")
    assert before.grid == -(-1000 // config.q_tile) * 2 * 4 and before.threads == 256
    assert before.smem_bytes == 0 and not before.persistent
    assert main.grid == plan.shape.n_kv * 2 * 2 and main.persistent and main.threads == 256
    assert dict(main.defines)["DC_SCHEDULE"] == "schedules/shortest_first.cuh"
    shared = {"DC_SEMAPHORE_STRIDE": SEMAPHORE_STRIDE, "DC_Q_TILE": config.q_tile,
              "DC_PARAMS_BYTES": params.n_bytes("backward")}
    for launch in plan.kernels:
        assert shared.items() <= dict(launch.defines).items()
    assert dict(main.defines)["DC_SMEM_BYTES"] == config.smem_bytes == main.smem_bytes


@pytest.mark.parametrize("name, mask", [("shift", "full"), ("symmetric_shift", "causal")])
def test_teams_are_launched_cooperatively(name, mask):
    """CTAs that wait for one another hang unless the driver promises that all run."""
    plan = make_plan(problem(mask=mask), "backward", B200, name)
    assert plan.team_size == schedules.get(name).team_size(plan.shape) > 1
    assert kernel(plan, "bwd_sm80").cooperative
    assert f"{plan.team_size} CTAs wait for one another" in plan.explain()
    assert not kernel(make_plan(problem(mask=mask), "backward", B200), "bwd_sm80").cooperative


def test_workspace_parts_lie_apart():
    """Regions that overlap corrupt one another; 16-byte reads need aligned ones."""
    plan = make_plan(problem(), "backward", B200, "auto", True, True)
    assert [region.name for region in plan.workspace] == list(params.WORKSPACE["backward"])
    end = 0
    for region in plan.workspace:
        assert region.offset % 256 == 0 and end <= region.offset < end + 256
        end = region.offset + region.n_bytes
    assert plan.workspace_bytes == end
    rows = 2 * 4 * plan.shape.n_q * plan.config.q_tile
    sizes = {region.name: region.n_bytes for region in plan.workspace}
    assert sizes == {"lse_log2": 4 * rows, "delta": 4 * rows, "dq_accum": 4 * rows * 128,
                     "dq_semaphore": 2 * 4 * plan.shape.n_q * 32, "work_counter": 4, "report": 32}


def test_workspace_is_linear_in_the_lengths():
    """A deterministic backward that stores scores cannot do long sequences."""
    sizes = [make_plan(problem(q_len=n, kv_len=n), "backward", H200).workspace_bytes
             for n in (1 << 14, 1 << 15, 1 << 16)]
    assert sizes[1] < 2.01 * sizes[0] and sizes[2] < 2.01 * sizes[1]
    short = make_plan(problem(q_len=64, kv_len=1 << 20), "backward", H200)
    assert short.workspace_bytes == make_plan(problem(q_len=64), "backward", H200).workspace_bytes


@pytest.mark.parametrize("changes, kernels, cleared", [
    ({"q_len": 0}, ["bwd_sm80"], ("work_counter",)),
    ({"n_q_head": 0}, ["bwd_sm80"], ("work_counter",)),
    ({"kv_len": 0}, ["bwd_preprocess"], ()),
    ({"batch": 0}, [], ()),
    ({"q_len": 0, "kv_len": 0}, [], ()),
    ({}, ["bwd_preprocess", "bwd_sm80"], ()),
])
@pytest.mark.parametrize("name", ["auto", "symmetric_shift"])
def test_empty_inputs(changes, kernels, cleared, name):
    """A grid of 0 is an error, a counter that nobody clears loses work, zeros must be written."""
    plan = make_plan(problem(**changes), "backward", B200, name)
    assert [kernel.kernel for kernel in plan.kernels] == kernels
    assert all(kernel.grid > 0 for kernel in plan.kernels)
    assert plan.cleared == cleared
    assert plan.explain()


@pytest.mark.parametrize("changes, n_kernel", [({"q_len": 0}, 0), ({"kv_len": 0}, 1),
                                               ({"batch": 0}, 0)])
def test_empty_forward(changes, n_kernel):
    """Without keys out is 0 and lse -inf, which somebody must write."""
    assert len(make_plan(problem(**changes), "forward", H200).kernels) == n_kernel


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["cpu", H200])
def test_explain_tells_everything(direction, target):
    """What a user needs to see why this was chosen, and what its bits depend on."""
    plan = make_plan(problem(), direction, target)
    text = plan.explain()
    wanted = [plan.fingerprint, plan.config.kernel, plan.config.reason, "j <= i + -100",
              f"q tile {plan.config.q_tile} rows", "batch 2", "4 q heads on 2 kv heads",
              f"{plan.workspace_bytes} bytes", *[k.grid_text for k in plan.kernels],
              *[f"{name}={value}" for k in plan.kernels for name, value in k.defines],
              *[f"{r.name}: {r.n_bytes} bytes at {r.offset}" for r in plan.workspace]]
    if direction == "backward":
        wanted += [schedules.get(plan.schedule).DESCRIPTION,
                   "for 'auto': a function of the problem"]
    if target == H200:
        wanted.append({"forward": "q tiles of 8 of the 8 q heads are handed out together",
                       "backward": "4 of the 4 kv heads take turns"}[direction])
    if direction == "forward" and target == H200:
        wanted += ["fwd_sm90: grid min(64 works, resident CTAs)", "fixed_reference True",
                   "loads by tensor map"]
    for part in wanted:
        assert part in text
    assert dataclasses.asdict(plan)["fingerprint"] == plan.fingerprint


@pytest.mark.parametrize("name, mask, message", [
    ("descendig", "causal", "did you mean 'descending'"),
    ("shift", "causal", "not defined for the causal mask"),
    ("symmetric_shift", "full", "not defined for the full mask"),
])
def test_wrong_schedules_are_refused(name, mask, message):
    """Never replaced by another one: bits would change without a word."""
    for direction in ("backward", "forward"):
        with pytest.raises(InvalidInputError, match=message):
            make_plan(problem(mask=mask), direction, H200, name)


@pytest.mark.parametrize("changes, message", [
    ({"batch": 1 << 30}, r"q tiles \* batch \* n_q_head"),
    ({"batch": 1 << 27, "q_len": 1, "n_q_head": 1, "n_kv_head": 1, "kv_len": 4096},
     r"works \* batch \* n_kv_head"),
    ({"kv_len": (1 << 30) + 1}, "kv_len"),
    (ONE_WORK | {"batch": 2**31 - 2**16 + 1}, r"works \* batch \* n_kv_head"),
])
def test_what_32_bits_cannot_count_is_refused(changes, message):
    """An overflow would address another tile."""
    with pytest.raises(UnsupportedError, match=message):
        make_plan(problem(**changes), "backward", H200)


def test_the_work_counter_may_run_past_the_last_work():
    """Every resident CTA takes one number too many; a counter that wraps hands out work 0 again."""
    for target in (B200, H200):
        plan = make_plan(problem(**ONE_WORK, batch=2**31 - 2**16), "backward", target)
        assert kernel(plan, plan.config.kernel).grid == 2**31 - 2**16
