"""The gradient through lse on a GPU: every main loop, rows that see no key, layouts, frameworks."""

import functools

from .support import (
    DEVICE,
    SCHEDULED,
    Case,
    backward,
    bits,
    expect_right,
    expect_same_bits,
    from_cupy,
    launcher_of,
    limit,
    run,
    torch,
)

# After support, which skips this file where there is no PyTorch.
import dashcupy.torch
import pytest
from dashcupy import env
from dashcupy.plan import make_plan
from dashcupy.problem import CAUSAL_OF_MASK
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

GRADS = ("dq", "dk", "dv")
INF = float("inf")
# Every main loop of Hopper, and the portable kernels as they run on any GPU.
KERNELS = [(head_dim, True) for head_dim in (40, 64, 128)] + [
    pytest.param(head_dim, False, marks=pytest.mark.sm90)
    for head_dim in (64, 80, 128, 192, 200, 256)]
every_kernel = pytest.mark.parametrize(("head_dim", "portable"), KERNELS)
every_mask = pytest.mark.parametrize("mask", ["full", "causal"])
no_debug = pytest.mark.skipif(
    env.debug(), reason="debug builds wait for the GPU, which no graph allows")


def case_of(head_dim, mask="causal", q_len=333, kv_len=400, **changes):
    return Case(q_len, kv_len, mask, head_dim, batch=2, n_q_head=4, n_kv_head=2).replace(**changes)


def draw_dlse(case, factor=2.0):
    """Normal numbers, of the seed of the case."""
    generator = torch.Generator(device=DEVICE).manual_seed(case.seed + 1000)
    return factor * torch.randn(case.batch, case.n_q_head, case.q_len, generator=generator,
                                device=DEVICE)


def gradients(case, inputs, forward, dlse, portable=False):
    """dq, dk and dv, by the kernels of this GPU or the portable ones."""
    if not portable:
        return dict(zip(GRADS, backward(case, inputs, forward["out"], forward["lse"], dlse=dlse)))
    plan = make_plan(case.problem, "backward", (8, 0), case.schedule)
    assert [kernel.kernel for kernel in plan.kernels] == ["bwd_preprocess", "bwd_sm80"]
    grads = {f"d{name}": torch.full_like(inputs[name], float("nan")) for name in "qkv"}
    arrays = inputs | {name: forward[name] for name in ("out", "lse")} | grads
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    launcher_of(plan, arrays | ({} if dlse is None else {"dlse": dlse}))(workspace)
    return grads


@every_mask
@every_kernel
def test_values(head_dim, portable, mask):
    # A sign, a row of another head, a factor of scale; rows and keys of tiles that are not full.
    for q_len, kv_len in ((333, 400), (400, 333), (64, 1), (1, 130)):
        case = case_of(head_dim, mask, q_len, kv_len, batch=8)
        inputs = case.draw()
        forward, dlse = run(case, inputs), draw_dlse(case)
        got = gradients(case, inputs, forward, dlse, portable)
        expect_right(case, inputs, got, dlse=dlse)
        without = gradients(case, inputs, forward, None, portable)
        assert not torch.equal(got["dq"], without["dq"])
        expect_same_bits({"dv": got["dv"]}, without, f"{case}: dv does not depend on dlse")


@every_kernel
def test_float16_and_a_loss_of_lse_alone(head_dim, portable):
    # dout is zero, and so is delta without dlse.
    case = case_of(head_dim, dtype="float16")
    inputs = case.draw()
    inputs["dout"].zero_()
    forward = run(case, inputs)
    dlse = 2 * forward["lse"]  # of (lse ** 2).sum()
    got = gradients(case, inputs, forward, dlse, portable)
    expect_right(case, inputs, got, dlse=dlse)
    assert not got["dv"].any() and got["dq"].any() and got["dk"].any()


@every_kernel
@pytest.mark.parametrize("factor", [1e-6, 1e4, 1e30])
def test_sizes(factor, head_dim, portable):
    # -delta in three bfloat16 parts as an operand of dP: all of float32, and its range.
    case = case_of(head_dim)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case, factor)
    expect_right(case, inputs, gradients(case, inputs, forward, dlse, portable), dlse=dlse)


@every_mask
@every_kernel
def test_zeros_give_the_bits_of_none(head_dim, portable, mask):
    # Frameworks hand over zeros for an lse that nobody uses.
    case = case_of(head_dim, mask, 400, 333)
    inputs = case.draw()
    forward = run(case, inputs)
    expected = gradients(case, inputs, forward, None, portable)
    zeros = torch.zeros_like(forward["lse"])
    expect_same_bits(gradients(case, inputs, forward, zeros, portable), expected, str(case))
    if not portable:
        expect_same_bits(expected, forward, "no dlse")


@pytest.mark.parametrize(("schedule", "mask"), SCHEDULED)
@pytest.mark.parametrize(("head_dim", "portable"), [
    (128, True), *(pytest.param(head_dim, False, marks=pytest.mark.sm90)
                   for head_dim in (64, 128, 192, 256))])
def test_every_schedule(head_dim, portable, schedule, mask):
    case = case_of(head_dim, mask, 650, 700, schedule=schedule)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    got = gradients(case, inputs, forward, dlse, portable)
    expect_right(case, inputs, got, dlse=dlse)
    zeros = torch.zeros_like(dlse)
    expect_same_bits(gradients(case, inputs, forward, zeros, portable),
                     gradients(case, inputs, forward, None, portable), str(case))


@pytest.mark.sm90
def test_unordered():
    # Zeros that the same kernel before it writes.
    case = case_of(128, "full", 650, 700, schedule="unordered")
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    expect_right(case, inputs, gradients(case, inputs, forward, dlse), dlse=dlse)


@every_kernel
@pytest.mark.parametrize(("q_len", "kv_len"), [(333, 200), (600, 100), (130, 1)])
def test_rows_that_see_no_key(q_len, kv_len, head_dim, portable):
    # Their lse is -inf, so a loss over all rows gives them NaN: parts of tiles, and whole ones.
    case = case_of(head_dim, "causal", q_len, kv_len)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    dead = q_len - kv_len
    expected = gradients(case, inputs, forward, dlse, portable)
    expect_right(case, inputs, expected, dlse=dlse)
    for value in (float("nan"), INF, -INF):
        dlse[:, :, :dead] = value
        got = gradients(case, inputs, forward, dlse, portable)
        expect_same_bits(got, expected, f"{case}, dlse {value} where no key is seen")
        assert not got["dq"][:, :dead].any()


@every_kernel
def test_rows_whose_scores_are_all_minus_infinity(head_dim, portable):
    # lse is -inf by values, not by the mask: no weight, whatever dlse is.
    case = case_of(head_dim, "full")
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    forward["lse"][:, :, 7] = -INF
    expected = gradients(case, inputs, forward, dlse, portable)
    dlse[:, :, 7] = float("nan")
    got = gradients(case, inputs, forward, dlse, portable)
    expect_same_bits(got, expected, str(case))
    assert not got["dq"][:, 7].any()


@every_mask
@every_kernel
def test_repeats(head_dim, portable, mask):
    # By bytes, into memory full of NaN.
    case = case_of(head_dim, mask, 1400, 1400, n_q_head=8)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    expected = gradients(case, inputs, forward, dlse, portable)
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for _ in range(30):
        got = gradients(case, inputs, forward, dlse, portable)
        wrong += torch.stack([(bits(got[name]) != bits(expected[name])).any() for name in GRADS])
    assert not wrong.any(), f"{case}: of 30 repeats differ {dict(zip(GRADS, wrong.tolist()))}"


@every_kernel
def test_batch_and_heads_around(head_dim, portable):
    # A batch or head of dlse that belongs to another one.
    case = case_of(head_dim)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    together = gradients(case, inputs, forward, dlse, portable)
    one = case.replace(batch=1)
    alone = gradients(one, {name: x[1:] for name, x in inputs.items()},
                      {name: forward[name][1:] for name in ("out", "lse")}, dlse[1:], portable)
    expect_same_bits({name: x[1:] for name, x in together.items()}, alone, "item 1 of 2")


@every_kernel
@pytest.mark.parametrize("place", [
    lambda x: torch.full((2, 9, 4, 700), float("nan"), device=DEVICE)[:, 3, :, 5:338].copy_(x),
    lambda x: torch.cat((x[..., :1], x), -1).transpose(0, 1).contiguous().transpose(0, 1)[..., 1:],
    lambda x: x[:1].expand_as(x),
], ids=["slice", "heads first", "one for all items"])
def test_strides(place, head_dim, portable):
    # Addresses that are multiples of 4 bytes only; what lies around is NaN.
    case = case_of(head_dim)
    inputs = case.draw()
    forward, dlse = run(case, inputs), place(draw_dlse(case))
    expect_same_bits(gradients(case, inputs, forward, dlse, portable),
                     gradients(case, inputs, forward, dlse.contiguous(), portable), str(case))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_arrays_that_are_copied_first(head_dim):
    # On Hopper other kernels run before the one that reads dlse.
    case = case_of(head_dim)
    inputs = case.draw()
    forward, dlse = run(case, inputs), draw_dlse(case)
    expected = gradients(case, inputs, forward, dlse)
    for name in ("q", "dout"):
        odd = torch.empty(*inputs[name].shape[:3], head_dim + 1, dtype=torch.bfloat16,
                          device=DEVICE)[..., 1:]
        there = inputs | {name: odd.copy_(inputs[name])}
        expect_same_bits(gradients(case, there, forward, dlse), expected, f"{name} at an odd place")


# --- frameworks -----------------------------------------------------------------------------------

CASE = case_of(64)


def attention(case, q, k, v):
    return dashcupy.torch.attention(q, k, v, causal=CAUSAL_OF_MASK[case.mask], return_lse=True)


def loss_of_out(results, dout):
    return (results[0].float() * dout.float()).sum()


def z_loss(results, dout):
    return loss_of_out(results, dout) + 0.5 * (results[1]**2).sum()


def by_autograd(case, inputs, function=attention, loss=z_loss):
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
    loss(function(case, q, k, v), inputs["dout"]).backward()
    return dict(zip(GRADS, (q.grad, k.grad, v.grad)))


def expected_of(case, inputs):
    """The gradients of `z_loss`."""
    forward = run(case, inputs)
    return gradients(case, inputs, forward, forward["lse"])


@pytest.mark.parametrize("head_dim", [
    64, 128, *(pytest.param(head_dim, marks=pytest.mark.sm90) for head_dim in (192, 256))])
def test_autograd(head_dim):
    case = case_of(head_dim)
    inputs = case.draw()
    expect_same_bits(by_autograd(case, inputs), expected_of(case, inputs), str(case))


def test_autograd_with_rows_that_see_no_key():
    # 0.5 * lse ** 2 is infinite there, and so is its gradient.
    case = case_of(64, "causal", 400, 333)
    inputs = case.draw()
    got = by_autograd(case, inputs)
    expect_same_bits(got, expected_of(case, inputs), str(case))
    assert all(x.isfinite().all() for x in got.values()) and not got["dq"][:, :67].any()


@pytest.mark.parametrize("change", [
    lambda lse: lse.sum(), lambda lse: lse[:, 1:3, ::2].square().sum(),
    lambda lse: lse.mT.contiguous().square().mean()], ids=["stride 0", "slice", "transposed"])
def test_gradients_of_any_layout(change):
    # What the kernel cannot read is copied: the gradient of a sum above all.
    inputs = CASE.draw()
    forward = run(CASE, inputs)
    lse = forward["lse"].clone().requires_grad_()
    dlse, = torch.autograd.grad(change(lse), lse)
    zeros = inputs | {"dout": torch.zeros_like(inputs["dout"])}
    got = by_autograd(CASE, inputs, loss=lambda results, dout: change(results[1]))
    expect_same_bits(got, gradients(CASE, zeros, forward, dlse.contiguous()), "layout")


def test_an_lse_that_is_not_used():
    inputs = CASE.draw()
    got = by_autograd(CASE, inputs, loss=loss_of_out)
    expect_same_bits(got, {name: run(CASE, inputs)[name] for name in GRADS}, "not used")


@limit(180)
def test_compiled_checkpointed_and_mapped():
    inputs = CASE.draw()
    expected = expected_of(CASE, inputs)
    compiled = torch.compile(lambda q, k, v: attention(CASE, q, k, v), fullgraph=True,
                             backend="aot_eager")
    expect_same_bits(by_autograd(CASE, inputs, lambda case, *x: compiled(*x)), expected, "compiled")
    for reentrant in (False, True):
        function = functools.partial(checkpoint, attention, use_reentrant=reentrant)
        expect_same_bits(by_autograd(CASE, inputs, function), expected, "checkpoint")
    single = [inputs[name][:, None] for name in ("q", "k", "v", "dout")]
    mapped = torch.vmap(torch.func.grad(
        lambda q, k, v, dout: z_loss(attention(CASE, q, k, v), dout), argnums=(0, 1, 2)))(*single)
    expect_same_bits(dict(zip(GRADS, (x[:, 0] for x in mapped))), expected, "vmap of grad")


@no_debug
@pytest.mark.parametrize("uses_lse", [False, True])
def test_graphed_callables(uses_lse):
    # They keep a gradient for each result in memory that is not initialised when it is recorded.
    inputs = CASE.draw()
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
    graphed = torch.cuda.make_graphed_callables(
        lambda q, k, v: attention(CASE, q, k, v), (q, k, v))
    loss = z_loss if uses_lse else loss_of_out
    forward = run(CASE, inputs)
    expected = gradients(CASE, inputs, forward, forward["lse"] if uses_lse else None)
    for _ in range(3):
        torch.full((1 << 24,), float("nan"), device=DEVICE)  # into memory that is free
        found = torch.autograd.grad(loss(graphed(q, k, v), inputs["dout"]), (q, k, v))
        expect_same_bits(dict(zip(GRADS, found)), expected, "graphed")


@no_debug
def test_cuda_graph():
    # The address of dlse is part of the graph, its values are not.
    inputs = [CASE.replace(seed=seed).draw() for seed in (0, 1)]
    given = [draw_dlse(CASE.replace(seed=seed)) for seed in (0, 1)]
    forward = [run(CASE, x) for x in inputs]
    expected = [gradients(CASE, *x) for x in zip(inputs, forward, given)]
    fixed, dlse = {name: x.clone() for name, x in inputs[0].items()}, given[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(CASE, fixed, run(CASE, fixed), dlse)
    for i in (0, 1, 1, 0):
        for name, x in fixed.items():
            x.copy_(inputs[i][name])
        dlse.copy_(given[i])
        graph.replay()
        expect_same_bits(got, expected[i], f"replay with inputs {i}")


def test_cupy():
    cupy = pytest.importorskip("cupy")
    inputs = CASE.draw()
    forward, dlse = run(CASE, inputs), draw_dlse(CASE)
    x = {name: cupy.from_dlpack(array) for name, array in
         (inputs | {"out": forward["out"], "lse": forward["lse"], "dlse": dlse}).items()}
    found = dashcupy.attention_backward(**x, causal=True)
    expect_same_bits({name: from_cupy(a) for name, a in zip(GRADS, found)},
                     gradients(CASE, inputs, forward, dlse), "CuPy")
    with pytest.raises(dashcupy.InvalidInputError, match="dlse has strides"):
        dashcupy.attention_backward(**(x | {"dlse": x["dlse"][..., ::-1]}), causal=True)
