"""A thousand repeats of one backward while others load the GPU; many small calls in a row."""

import os

import pytest
from dashcupy import driver
from dashcupy.plan import Plan, make_plan

from . import kernels
from .support import (
    DEVICE,
    Case,
    bits,
    compile_plans,
    expect_right,
    launcher_of,
    limit,
    run,
    torch,
    with_pauses,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

N_REPEAT = 1000
# head_dim 64 and 128, 1k to 4k rows, groups of heads, odd tile counts, teams and none.
# The first is one that another kernel was reported to change its dq at.
CELLS = [
    Case(1024, 1024, "full", 64, "float16", batch=2, n_q_head=12, n_kv_head=12),
    Case(1024, 1024, "causal", 64, batch=2, n_q_head=16, n_kv_head=16),
    Case(2048, 2048, "full", 64, batch=1, n_q_head=16, n_kv_head=4, schedule="shift"),
    Case(1984, 1984, "causal", 64, n_q_head=16, n_kv_head=16, schedule="symmetric_shift"),
    Case(1024, 1024, "full", 128, batch=2, n_q_head=16, n_kv_head=16),
    Case(2048, 2048, "causal", 128, n_q_head=16, n_kv_head=2, schedule="shortest_first"),
    Case(3008, 3008, "causal", 128, n_q_head=8, n_kv_head=8, schedule="symmetric_shift"),
    Case(2600, 2600, "causal", 128, n_q_head=6, n_kv_head=6, schedule="longest_first"),
    Case(4096, 4096, "causal", 64, n_q_head=12, n_kv_head=12, schedule="longest_first"),
    Case(4096, 4096, "causal", 128, n_q_head=8, n_kv_head=4),
    Case(1100, 4000, "full", 128, n_q_head=8, n_kv_head=8, schedule="shift"),
]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    CELLS += [Case(2000, 2000, "causal", 192, n_q_head=8, n_kv_head=4),
              Case(1500, 2100, "full", 192, n_q_head=8, n_kv_head=8, schedule="shift"),
              Case(1984, 1984, "causal", 256, n_q_head=8, n_kv_head=8),
              Case(1500, 2100, "full", 256, n_q_head=8, n_kv_head=8, schedule="shift")]


def plans_of(case: Case) -> list[Plan]:
    """Forward, backward, and a backward of which warps of bwd_sm90 pause now and then."""
    capability = driver.device(0).compute_capability
    forward, plan = (make_plan(case.problem, direction, capability, case.schedule)
                     for direction in ("forward", "backward"))
    return [forward, plan, with_pauses(plan)]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of the cells are on disk."""
    compile_plans(plan for case in CELLS for plan in plans_of(case))


@limit(120)
@pytest.mark.parametrize("case", CELLS, ids=lambda case: (
    f"d{case.head_dim}-{case.mask}-{case.q_len}-{case.schedule}"))
def test_a_thousand_repeats(case):
    # An order that is kept nearly always. Every other launch is a build with pauses; SMs are taken
    # by another stream all the while.
    inputs = case.draw()
    expected = run(case, inputs)
    expect_right(case, inputs, expected)
    _, plan, delayed = plans_of(case)
    grads = {name: torch.empty_like(expected[name]) for name in ("dq", "dk", "dv")}
    given = inputs | {name: expected[name] for name in ("out", "lse")} | grads
    launches = [launcher_of(one, given) for one in (plan, delayed)]
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    load = torch.cuda.Stream()
    kernels.spin(1, 1, load.cuda_stream)
    for i in range(N_REPEAT):
        for x in grads.values():
            x.fill_(float("nan"))
        if i % 4 == 0:
            kernels.spin(10 + 37 * i % 100, 60_000 + 50_000 * (i % 5), load.cuda_stream)
        launches[i % 2](workspace)
        wrong += torch.stack([(bits(x) != bits(expected[name])).any()
                              for name, x in grads.items()])
    count = dict(zip(grads, wrong.tolist()))
    torch.cuda.synchronize()
    assert not any(count.values()), f"{case}: of {N_REPEAT} repeats differ {count}"


@limit(60)
def test_many_small_calls():
    # Memory that grows from call to call, a bit that changes, or an out of memory that keeps some:
    # a short run of bench/soak.py. Beside other workers of pytest-xdist, which take and give back
    # memory of the GPU, only that of this process is judged: its pool, and the host's.
    soak = pytest.importorskip("bench.soak", reason="bench is beside tests in a checkout only")
    shared = ["--shared-gpu"] if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else []
    assert soak.main(["--calls", "8000", "--readings", "4", *shared]) == 0
