"""Random problems on a GPU: right values and stable bits, sums by ticket, mistakes that pass by."""

import dashcupy
import pytest
from dashcupy import driver
from dashcupy.plan import make_plan
from dashcupy.problem import CAUSAL_OF_MASK, Problem
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_problems import SEED, RandomProblem, keeper, lengths, problems

from . import test_memory, test_order, truth
from .support import (
    DEVICE,
    SCHEDULED,
    Case,
    compile_plans,
    expect_same_bits,
    limit,
    run,
    torch,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# head_dim, dtype, schedules: few enough that all their kernels compile in seconds on many cores.
KINDS = {
    (8, "float16"): ("ascending", "auto"),
    (64, "bfloat16"): ("auto", "ascending", "descending", "shortest_first", "longest_first",
                       "shift", "symmetric_shift"),
    (72, "float16"): ("descending", "auto"),
    (88, "bfloat16"): ("ascending", "auto"),
    (96, "bfloat16"): ("shortest_first", "shift", "symmetric_shift"),
    (128, "bfloat16"): ("auto", "ascending", "descending", "shortest_first", "shift",
                        "symmetric_shift"),
    (128, "float16"): ("longest_first", "shift", "symmetric_shift"),
}
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    KINDS |= {(136, "float16"): ("auto", "shift"),
              (184, "bfloat16"): ("shortest_first", "auto"),
              (192, "bfloat16"): ("auto", "ascending", "longest_first", "symmetric_shift"),
              (256, "bfloat16"): ("auto", "longest_first", "shift", "symmetric_shift")}
LAYOUTS = {
    "plain": lambda x: x,
    "heads first": test_memory._heads_before_rows,
    "batch inside": test_memory._batch_innermost_but_one,
    "odd rows": test_memory._odd_rows,
    "shifted": test_memory._shifted_by_one,
    "in nan": lambda x: test_memory._in_nan(x.shape, x.dtype)[1].copy_(x),
    "one head for all": lambda x: x[:, :, :1].expand_as(x),
}
QUIET = dict(database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of these problems are on disk."""
    capability = driver.device(0).compute_capability
    compile_plans(
        make_plan(Problem(1, 8, 8, 1, 1, head_dim, dtype, mask, 1.0), direction, capability, name,
                  aligned)
        for (head_dim, dtype), names in KINDS.items() for mask in ("full", "causal")
        for name in names if name == "auto" or (name, mask) in SCHEDULED
        for aligned in (False, True) for direction in ("forward", "backward"))


@pytest.fixture
def keep(request):
    return keeper(request.config)


def draw_inputs(problem: RandomProblem) -> dict:
    """q, k, v and dout as they are laid out."""
    case = Case(problem.q_len, problem.kv_len, problem.mask, problem.head_dim, problem.dtype,
                problem.batch, problem.n_q_head, problem.n_kv_head, factor=problem.factor,
                seed=problem.seed)
    return {name: LAYOUTS[layout](x)
            for (name, x), layout in zip(case.draw().items(), problem.layouts)}


def results(problem: RandomProblem, inputs: dict) -> dict:
    """Forward, then backward with its results."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    options = dict(causal=CAUSAL_OF_MASK[problem.mask], scale=problem.scale)
    out, lse = dashcupy.attention(q, k, v, return_lse=True, **options)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, schedule=problem.schedule,
                                        **options)
    return dict(zip(truth.NAMES, (out, lse, *grads)))


def kinds():
    """Problems of every kind, each with a schedule of its own."""
    return st.sampled_from(list(KINDS)).flatmap(lambda kind: problems(
        [kind], tiles=(64, 96, 128, 192), most=450, layouts=tuple(LAYOUTS), orders=KINDS[kind]))


@limit(300)
@seed(SEED)
@settings(max_examples=2000, **QUIET)
@given(problem=kinds())
def test_values(keep, problem):
    # No combination of mask, lengths, heads, strides and schedule is wrong, or changes a bit.
    keep(problem)
    inputs = draw_inputs(problem)
    got = results(problem, inputs)
    arguments = (*(inputs[name] for name in ("q", "k", "v", "dout")), problem.mask, problem.scale)
    exact = truth.attention(*arguments)
    wrong = truth.faults(got, exact, truth.attention(
        *arguments, dtype=getattr(torch, problem.dtype)))
    assert not wrong, "\n".join([str(problem), *wrong])
    plain = {name: x.contiguous() for name, x in inputs.items()}
    expect_same_bits(results(problem, plain), got, f"{problem}, in C order")


@limit(120)
@seed(SEED)
@settings(max_examples=200, **QUIET)
@given(q_len=lengths((64, 128), 900).filter(bool), kv_len=lengths((128,), 1700).filter(bool),
       head_dim=st.sampled_from((64, 128)), data=st.data())
def test_sums_follow_every_schedule(keep, q_len, kv_len, head_dim, data):
    # Tile counts that no table of cases has: a turn that is right for an even count, say.
    name, mask = data.draw(st.sampled_from(SCHEDULED))
    if mask == "causal":
        mask = data.draw(st.sampled_from(("causal", "causal_top_left")))
    case = Case(q_len, kv_len, mask, head_dim, n_q_head=1, n_kv_head=1, schedule=name)
    keep(case)
    test_order.expect_ticket_order(case)


# What may be wrong with q, k, v, dout, out, lse and dlse, and the options.
MISTAKES = (
    lambda x: {"k": x["k"].cpu()}, lambda x: {"v": x["v"].cpu().float().numpy()},
    lambda x: {"k": x["k"].half()}, lambda x: {"lse": x["lse"].bfloat16()},
    lambda x: {name: x[name].float() for name in ("q", "k", "v", "dout", "out")},
    lambda x: {"q": x["q"].mT.contiguous().mT}, lambda x: {"v": x["v"][:, :-1]},
    lambda x: {"q": x["q"][:, :, :3]}, lambda x: {"dout": x["dout"][:1]},
    lambda x: {"dout": x["dout"][..., :1].expand_as(x["dout"])},
    lambda x: {"out": x["out"][0]}, lambda x: {"lse": x["lse"].mT},
    lambda x: {"dlse": x["lse"].mT}, lambda x: {"dlse": x["lse"][..., :1].expand_as(x["lse"])},
    lambda x: {"dlse": x["lse"].half()}, lambda x: {"dlse": x["lse"].cpu()},
    lambda x: {name: x[name][..., :60] for name in ("q", "k", "v", "dout", "out")},
    lambda x: {"q": x["q"].to_sparse()}, lambda x: {"k": None},
    lambda x: {"grads": (x["q"], None, None)}, lambda x: {"grads": (None, x["dout"], None)},
    lambda x: {"workspace": x["lse"]},
    lambda x: {"workspace": torch.empty(16, dtype=torch.uint8, device=DEVICE)},
    lambda x: {"scale": 0.0}, lambda x: {"scale": float("nan")}, lambda x: {"scale": x["lse"]},
    lambda x: {"causal": "yes"}, lambda x: {"schedule": "shfit"},
    lambda x: {"schedule": "shift", "causal": True},
)


def test_mistakes(keep):
    # An error of CUDA, a hang, or a refusal that spoils the next call: on this thread's stream, in
    # the caches, in what is known of calls.
    case = Case(200, 333, "causal", batch=2, n_q_head=4, n_kv_head=2)
    inputs = case.draw()
    expected = run(case, inputs)
    good = inputs | {name: expected[name] for name in ("out", "lse")} | {"causal": True}
    for i, mistake in enumerate(MISTAKES):
        keep(i)
        wrong = mistake(good)
        for _ in range(2):  # the second time the kind is known
            with pytest.raises(dashcupy.DashcupyError):
                dashcupy.attention_backward(**(good | wrong))
        grads = dashcupy.attention_backward(**good)
        torch.cuda.synchronize()
        expect_same_bits(dict(zip(("dq", "dk", "dv"), grads)), expected, f"after mistake {i}")
