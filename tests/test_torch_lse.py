"""The gradient through lse in the layer for PyTorch: values, who hands it over, who does not."""

import functools

import dashcupy
import pytest
from dashcupy import call
from dashcupy.errors import InvalidInputError, UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dashcupy.torch as dash  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def tensors(q_len=9, kv_len=11, dtype=torch.float64, n_q_head=4, n_kv_head=2):
    """q, k and v that require a gradient."""
    torch.manual_seed(0)
    q = torch.randn(2, q_len, n_q_head, 8)
    k, v = torch.randn(2, 2, kv_len, n_kv_head, 8)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def both(q, k, v, **options):
    return dash.attention(q, k, v, causal=True, return_lse=True, **options)


def loss(q, k, v):
    """One with a z-loss: a penalty on large lse."""
    out, lse = both(q, k, v)
    return (out**2).sum() + (lse**2).mean()


def gradients(function, *arrays):
    """By backward(), which is all that a checkpoint of the older kind allows."""
    for x in arrays:
        x.grad = None
    function(*arrays).backward()
    return [x.grad for x in arrays]


def expect_equal(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def given(monkeypatch):
    """Whether each backward was given a gradient of lse."""
    seen, run = [], call.run

    def record(direction, inputs, *arguments, **options):
        if direction == "backward":
            seen.append(inputs[-1] is not None)
        return run(direction, inputs, *arguments, **options)

    monkeypatch.setattr(call, "run", record)
    return seen


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_finite_differences(causal):
    function = functools.partial(dash.attention, causal=causal, return_lse=True)
    assert torch.autograd.gradcheck(function, tensors(), check_batched_grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bits_are_those_of_the_functions_of_arrays(dtype, given):
    q, k, v = tensors(dtype=dtype)
    options = dict(scale=0.3, schedule="shortest_first")
    out, lse = both(q, k, v, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for of_out, of_lse in ((dout, dlse), (None, dlse), (dout, None)):
        given_to = [(x, dx) for x, dx in ((out, of_out), (lse, of_lse)) if dx is not None]
        results, grads = zip(*given_to)
        found = torch.autograd.grad(results, (q, k, v), grads, retain_graph=True)
        expect_equal(found, dashcupy.attention_backward(
            torch.zeros_like(out) if of_out is None else dout, q, k, v, out, lse, dlse=of_lse,
            causal=True, **options))
    assert given == [True] * 4 + [False] * 2


def test_parts_of_the_keys_merged_by_their_lse():
    """What rings of GPUs do: the gradients must be those of one attention over all keys."""
    q, k, v = tensors(n_kv_head=4)
    halves = [dash.attention(q, k[:, part], v[:, part], return_lse=True)
              for part in (slice(0, 4), slice(4, 11))]
    weights = torch.softmax(torch.stack([lse for _, lse in halves]), 0).transpose(2, 3)[..., None]
    merged = sum(out * weight for (out, _), weight in zip(halves, weights))
    dout = torch.randn_like(merged)
    whole = dash.attention(q, k, v)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)
    for x, y in zip(torch.autograd.grad(merged, (q, k, v), dout),
                    torch.autograd.grad(whole, (q, k, v), dout)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [
    lambda x: x[:1, :1, :1].expand(2, 4, 9), lambda x: x.mT.contiguous().mT,
    lambda x: x.repeat_interleave(2, -1)[..., ::2], torch._neg_view,
], ids=["stride 0", "transposed", "strided", "negated memory"])
def test_gradients_of_any_layout(change):
    q, k, v = tensors()
    out, lse = both(q, k, v)
    dlse = change(torch.randn_like(lse))
    expected = dashcupy.attention_backward(torch.zeros_like(out), q, k, v, out, lse, causal=True,
                                           dlse=dlse.resolve_neg().contiguous())
    expect_equal(torch.autograd.grad(lse, (q, k, v), dlse), expected)


def test_zeros_without_memory():
    """PyTorch makes such gradients; the kernel would find none."""
    q, k, v = tensors()
    out, lse = both(q, k, v)
    zeros = torch._efficientzerotensor(lse.shape, dtype=lse.dtype)
    found = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), zeros))
    expect_equal(found, gradients(lambda *x: both(*x)[0].sum(), q, k, v))


def test_rows_that_see_no_key():
    """Their lse is -inf, so that a loss over all rows hands them NaN or infinity."""
    q, k, v = tensors(11, 9)
    _, lse = both(q, k, v)
    found = torch.autograd.grad((lse**2).mean(), (q, k, v))
    seen = lse[:, :, 2:]
    expected = gradients(lambda *x: (both(*x)[1][:, :, 2:]**2).sum() / lse.numel(), q, k, v)
    assert seen.isfinite().all() and not found[0][:, :2].any()
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-15)


def _checkpointed(reentrant):
    def function(q, k, v):
        out, lse = checkpoint(both, q * 1, k, v, use_reentrant=reentrant)
        return (out**2).sum() + (lse**2).mean()
    return function


@pytest.mark.parametrize("function", [
    torch.compile(loss, fullgraph=True, backend="aot_eager"),
    torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager"),
    _checkpointed(False), _checkpointed(True),
], ids=["compiled", "dynamic", "checkpoint", "reentrant checkpoint"])
def test_what_is_around_it_changes_no_bit(function):
    for q_len in (9, 12, 31):
        x = tensors(q_len, q_len + 3)
        expect_equal(gradients(function, *x), gradients(loss, *x))


def test_function_transforms():
    q, k, v = (x.detach() for x in tensors())
    expected = gradients(loss, *tensors())
    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    expect_equal(grad(q, k, v), expected)
    mapped = torch.vmap(grad, in_dims=(0, None, 0))(torch.stack((q, 2 * q)), k,
                                                    torch.stack((v, v)))
    expect_equal([x[0] for x in mapped], expected)
    small = q[:1, :3], k[:1, :4], v[:1, :4]

    def naive(q, k, v):
        k = k.repeat_interleave(2, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        return torch.logsumexp(scores, -1)

    for argnum in (0, 1):
        found = torch.func.jacrev(lambda *x: dash.attention(*x, return_lse=True)[1], argnum)(*small)
        torch.testing.assert_close(found, torch.func.jacrev(naive, argnum)(*small), rtol=0,
                                   atol=1e-12)


def _plain(*x):
    return dash.attention(*x, causal=True).sum()


@pytest.mark.parametrize("use", [
    lambda *x: gradients(_plain, *x), lambda *x: gradients(lambda *x: both(*x)[0].sum(), *x),
    lambda *x: gradients(torch.compile(_plain, fullgraph=True, backend="aot_eager"), *x),
    lambda *x: gradients(lambda *x: checkpoint(_plain, *x, use_reentrant=False), *x),
    lambda *x: checkpoint(_plain, *x, use_reentrant=True).backward(),
    lambda *x: torch.func.grad(_plain)(*(a.detach() for a in x)),
    lambda *x: torch.vmap(torch.func.grad(_plain))(*(a.detach()[None] for a in x)),
    lambda *x: torch.func.jacrev(_plain)(*(a.detach() for a in x)),
    lambda *x: gradients(lambda *x: torch.vmap(dash.attention)(*(a[None] for a in x)).sum(), *x),
], ids=["eager", "asked for", "compiled", "checkpoint", "reentrant checkpoint", "grad",
        "vmap of grad", "jacrev", "grad of vmap"])
def test_an_lse_that_is_not_used_is_not_looked_at(use, given):
    """It would cost a copy, and be taken for a gradient where it is not even initialised."""
    use(*tensors())
    assert given and not any(given)


def test_zeros_for_an_lse_that_is_not_used_change_no_bit(given):
    """What hands over a gradient for each output, has to make one up."""
    x = tensors(dtype=torch.float32)
    expected = gradients(_plain, *x)
    for function in (torch.compile(both, fullgraph=True, backend="aot_eager"),
                     functools.partial(checkpoint, both, use_reentrant=True)):
        expect_equal(gradients(lambda *x, function=function: function(*x)[0].sum(), *x), expected)
    assert given == [False, True, True]


def test_packed_arrays_and_the_names_of_flash_attn():
    q, k, v = tensors(9, 9, n_kv_head=4)
    qkv = torch.stack((q, k, v), 2).detach().requires_grad_()
    kv = qkv[:, :, 1:].detach().requires_grad_()
    expected = gradients(loss, q, k, v)
    for function, arrays, pack in (
            (dash.flash_attn_func, (q, k, v), lambda *x: x),
            (dash.flash_attn_kvpacked_func, (q, kv), lambda q, *kv: (q, torch.stack(kv, 2))),
            (dash.flash_attn_qkvpacked_func, (qkv,), lambda *x: (torch.stack(x, 2),))):
        out, lse, _ = function(*arrays, causal=True, return_attn_probs=True)
        value = (out**2).sum() + (lse**2).mean()
        expect_equal(torch.autograd.grad(value, arrays), pack(*expected))


def test_second_derivatives_are_refused():
    q, k, v = tensors()
    first, = torch.autograd.grad((both(q, k, v)[1]**2).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        first.sum().backward()


def test_lse_is_not_recorded_where_nothing_is():
    q, k, v = tensors()
    with torch.no_grad():
        assert not both(q, k, v)[1].requires_grad
    assert not both(q.detach(), k.detach(), v.detach())[1].requires_grad


@pytest.mark.parametrize("odd", ["dout", "k", "lse", "dlse"])
def test_one_array_of_another_device_is_refused(odd):
    """torch asks only for shapes where one is meta, and would give memory that nobody wrote."""
    q, k, v = (x.detach() for x in tensors())
    out, lse = both(q, k, v)
    x = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse}
    x[odd] = x[odd].to("meta")
    with pytest.raises(InvalidInputError, match=f"{odd} is on meta.*one device"):
        torch.ops.dashcupy.attention_backward(*x.values(), "causal", None, "auto")
