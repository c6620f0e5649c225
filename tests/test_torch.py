"""Differentiable attention of torch tensors, on the CPU: values, bits, and what surrounds it."""

import inspect
import warnings

import dashcupy
import pytest
from dashcupy.errors import InvalidInputError, UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dashcupy.torch as dash  # noqa: E402
from dashcupy.torch import ops  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

F = torch.nn.functional
LONG = (300, 1300)  # three kv tiles of the CPU backend: with two, all orders give equal bits


def tensors(q_len=9, kv_len=11, dtype=torch.float64, n_q_head=4, n_kv_head=2, head_dim=8, batch=2):
    """q, k and v that require a gradient, and dout."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, batch, q_len, n_q_head, head_dim).to(dtype)
    k, v = torch.randn(2, batch, kv_len, n_kv_head, head_dim).to(dtype)
    return *[x.requires_grad_() for x in (q, k, v)], dout


def truth(q, k, v, causal=False):
    """PyTorch's attention in the layout of this package."""
    mask = None
    if causal:
        offset = 0 if causal == "top_left" else k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(offset)
    return F.scaled_dot_product_attention(
        *[x.transpose(1, 2) for x in (q, k, v)], mask, enable_gqa=True).transpose(1, 2)


def gradients(function, q, k, v, dout):
    """out, dq, dk and dv."""
    out = function(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def expect_equal(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def expect_close(got, expected):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_values_and_gradients_are_those_of_pytorch(causal):
    q, k, v, dout = tensors()
    expect_close(gradients(lambda *x: dash.attention(*x, causal=causal), q, k, v, dout),
                 gradients(lambda *x: truth(*x, causal), q, k, v, dout))


@pytest.mark.parametrize("schedule, dtype", [
    ("auto", torch.bfloat16), ("ascending", torch.float32), ("shortest_first", torch.float32)])
def test_bits_are_those_of_the_functions_of_arrays(schedule, dtype):
    """The schedule, mask and scale must reach the backward: bits depend on each of them."""
    q, k, v, dout = tensors(*LONG, dtype, 2, 1, batch=1)
    out, lse = dashcupy.attention(q, k, v, causal=True, scale=0.3, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True, scale=0.3,
                                        schedule=schedule)
    expect_equal(gradients(lambda *x: dash.attention(*x, causal=True, scale=0.3,
                                                     schedule=schedule), q, k, v, dout),
                 (out, *grads))


def test_schedules_differ_in_bits():
    """Otherwise the test above would not see a schedule that is dropped."""
    q, k, v, dout = tensors(*LONG, torch.float32, 2, 1, batch=1)
    first, second = (gradients(lambda *x, name=name: dash.attention(*x, schedule=name),
                               q, k, v, dout) for name in ("ascending", "shortest_first"))
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("change", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x[:1, :1].expand_as(x),
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
], ids=["transposed", "expanded", "strided"])
def test_any_strides(change):
    """Views of the inputs and of dout: gradients arrive at the tensors behind them."""
    q, k, v, dout = tensors()
    got = gradients(lambda *x: dash.attention(*map(change, x)), q, k, v, change(dout))
    expect_close(got, gradients(lambda *x: truth(*map(change, x)), q, k, v, change(dout)))


def test_gradient_of_a_sum_and_of_negated_memory():
    """dout of .sum() has strides of 0; that of an imaginary part has a flag for its sign."""
    q, k, v, dout = tensors()
    expect_close(torch.autograd.grad(dash.attention(q, k, v).sum(), (q, k, v)),
                 torch.autograd.grad(truth(q, k, v).sum(), (q, k, v)))
    expect_equal(gradients(dash.attention, q, k, v, torch._neg_view(dout))[1:],
                 gradients(dash.attention, q, k, v, -dout)[1:])


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def test_on_a_gpu_only_rows_that_are_not_contiguous_are_copied():
    x = torch.zeros(2, 3, 4, 8).as_subclass(OnGpu)
    for good in (x, x.transpose(1, 2), x[..., :4], x[:1].expand(5, 3, 4, 8)):
        assert ops.contiguous_rows(good) is good
    for bad in (x.transpose(2, 3), x[..., :1].expand(2, 3, 4, 8), x[..., ::2]):
        assert ops.contiguous_rows(bad).is_contiguous()


def test_nothing_is_copied_for_the_backward():
    q, k, v, _ = tensors()
    out, lse = dash.attention(q, k, v, return_lse=True)
    assert [x.data_ptr() for x in out.grad_fn.saved_tensors] == [
        x.data_ptr() for x in (q, k, v, out, lse)]


@pytest.mark.parametrize("name", ops.ARRAYS)
def test_operators_pass_the_checks_of_torch(name):
    q, k, v, dout = tensors(9, 9, torch.float32, 4, 4)
    arrays = {"attention": (q, k, v), "attention_kvpacked": (q, torch.stack((k, v), 2).detach()),
              "attention_qkvpacked": (torch.stack((q, k, v), 2).detach().requires_grad_(),)}[name]
    torch.library.opcheck(ops.OPERATORS[name], (*arrays, "causal", None, "auto"))
    arrays = [x.detach() for x in arrays]
    results = ops.OPERATORS[name](*arrays, "causal", None, "auto")
    for dlse in (None, torch.randn(2, 4, 9)):
        torch.library.opcheck(ops.OPERATORS[f"{name}_backward"],
                              (dout, *arrays, *results, dlse, "causal", None, "auto"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_graph_breaks(dynamic):
    function = torch.compile(
        lambda q, k, v: dash.attention(q * 2, k, v, causal=True, schedule="shortest_first") + 1,
        fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for q_len in (9, 12, 31):
        q, k, v, dout = tensors(q_len, q_len + 3)
        expect_equal(gradients(function, q, k, v, dout), gradients(
            lambda q, k, v: dash.attention(q * 2, k, v, causal=True,
                                           schedule="shortest_first") + 1, q, k, v, dout))


def test_compiler_passes_our_words_on():
    q, k, v, _ = tensors()
    for call, words in ((lambda: dash.attention(q, k, v[..., :4]), "v has shape"),
                        (lambda: dash.attention(q, k, v, schedule="shif"), "did you mean"),
                        (lambda: dash.attention(q, k, v, causal="left"), "causal='left'")):
        with pytest.raises(Exception, match=words):
            torch.compile(call, fullgraph=True, backend="aot_eager")()


def test_exported_with_a_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, x):
            return dash.attention(x, x, x, causal=True)

    exported = torch.export.export(Model(), (torch.randn(2, 9, 4, 8),), dynamic_shapes=(
        {1: torch.export.Dim("length", min=2, max=64)},)).module()
    x = torch.randn(2, 50, 4, 8)
    assert torch.equal(exported(x), dash.attention(x, x, x, causal=True))


def test_exported_with_a_dynamic_batch():
    """Not one that must stay larger or smaller than another size."""
    class Model(torch.nn.Module):
        def forward(self, x):
            return dash.attention(x, x, x)

    exported = torch.export.export(Model(), (torch.randn(5, 9, 4, 8),), dynamic_shapes=(
        {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)).module()
    for x in (torch.randn(2, 9, 4, 8), torch.randn(20, 3, 4, 8)):
        assert torch.equal(exported(x), dash.attention(x, x, x))


def test_autocast_casts_as_for_pytorchs_attention():
    q, k, v, dout = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = dash.attention(q, k, v)
        assert dash.attention(*[x.double() for x in (q, k, v)]).dtype == torch.float64
    expected = dash.attention(*[x.bfloat16() for x in (q, k, v)])
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16
    assert torch.autograd.grad(out, q, dout.bfloat16())[0].dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_activation_checkpoints(reentrant):
    q, k, v, dout = tensors()

    def block(q, k, v):
        return checkpoint(dash.attention, q * 1, k, v, use_reentrant=reentrant) * 2

    checkpoint(block, q, k, v, use_reentrant=reentrant).backward(dout)
    expect_equal((q.grad, k.grad, v.grad), gradients(
        lambda *x: dash.attention(*x) * 2, q, k, v, dout)[1:])


def test_function_transforms():
    """vmap must give the bits of a loop: the batch is not what they depend on."""
    q, k, v = torch.randn(3, 3, 2, 9, 2, 8).unbind(0)

    def loss(q, k, v):
        return (dash.attention(q, k, v, causal=True) ** 2).sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    looped = [torch.stack(x) for x in zip(*[grad(q[i], k[0], v[i]) for i in range(3)])]
    expect_equal(torch.vmap(grad, in_dims=(0, None, 0))(q, k[0], v), looped)
    leaf = q[0].clone().requires_grad_()
    assert torch.equal(grad(q[0], k[0], v[0])[0],
                       torch.autograd.grad(loss(leaf, k[0], v[0]), leaf)[0])
    inside_out = torch.vmap(dash.attention, in_dims=(1, None, None), out_dims=1)
    assert torch.equal(inside_out(q.movedim(0, 1), k[0], v[0])[:, 2],
                       dash.attention(q[2], k[0], v[0]))
    small = q[0, :1, :2]
    jacobian = torch.func.jacrev(lambda q: dash.attention(q, small, small))(small)
    torch.testing.assert_close(jacobian, torch.func.jacrev(lambda q: truth(q, small, small))(small))


@pytest.mark.parametrize("function", [dash.attention, truth])
def test_no_grad_holds_for_the_transforms_around(function):
    """The value is a constant of the outer gradient, too: q * constant has no second one."""
    q, k, v = (x.detach() for x in tensors(9, 9, n_kv_head=4)[:3])

    def inner(q):
        with torch.no_grad():
            constant = function(q, k, v)
        return (q * constant).sum()

    assert torch.equal(torch.func.grad(inner)(q), function(q, k, v))
    outer = torch.func.grad(lambda q: torch.func.grad(inner)(q).sum())(q)
    assert torch.equal(outer, torch.zeros_like(q))


def test_only_what_is_asked_for_gets_a_gradient():
    q, k, v, dout = tensors()
    expected = gradients(dash.attention, q, k, v, dout)
    for i, wanted in enumerate((q, k, v), start=1):
        given = [x if x is wanted else x.detach() for x in (q, k, v)]
        found, = torch.autograd.grad(dash.attention(*given), wanted, dout)
        assert torch.equal(found, expected[i])
    with torch.no_grad():
        assert not dash.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(dash.attention(q, k, v), expected[0])
    meta = dash.attention(*[x.to("meta") for x in (q, k, v)], return_lse=True)
    assert [x.shape for x in meta] == [q.shape, (2, 4, 9)]


def test_derivatives_that_do_not_exist_are_refused():
    """A silent zero would be the alternative."""
    q, k, v, _ = tensors()
    first, = torch.autograd.grad(dash.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        first.sum().backward()
    q, k, v = q.detach(), k.detach(), v.detach()

    def loss(q):
        return dash.attention(q, k, v).sum()

    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
    for function in (lambda: torch.func.jvp(loss, (q,), (q,)), lambda: torch.func.hessian(loss)(q)):
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            function()


@pytest.fixture
def deterministic():
    """Sets the flag, which is as it was afterwards."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_deterministic_request_is_honoured_or_refused(deterministic):
    q, k, v, dout = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = dash.attention(q, k, v, schedule="unordered")
    deterministic(True)
    with pytest.raises(UnsupportedError, match="use another, such as 'auto'"):
        dash.attention(q, k, v, schedule="unordered")
    with pytest.raises(UnsupportedError, match="use_deterministic_algorithms"):  # set since then
        out.backward(dout)
    gradients(dash.attention, q, k, v, dout)
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match="schedule='unordered' is not deterministic"):
        dash.attention(q, k, v, schedule="unordered")


_Q, _K, _V, _ = tensors()


@pytest.mark.parametrize("call, error, words", [
    (lambda: dash.attention(_Q.detach().numpy(), _K, _V), InvalidInputError, "not a torch tensor"),
    (lambda: dash.attention(_Q, _K.to("meta"), _V), InvalidInputError, "one device"),
    (lambda: dash.attention(_Q[0], _K[0], _V[0]), InvalidInputError, "q has shape"),
    (lambda: dash.attention(_Q, _K[:, :, :1], _V), InvalidInputError, "v has shape"),
    (lambda: dash.attention(_Q[:, :, :3], _K, _V), InvalidInputError, "must be a multiple"),
    (lambda: dash.attention(_Q.float(), _K, _V), InvalidInputError, "k has dtype float64"),
    (lambda: dash.attention(*[x.int() for x in (_Q, _K, _V)]), InvalidInputError, "dtype int32"),
    (lambda: dash.attention(_Q.detach().to_sparse(), _K, _V), InvalidInputError, "sparse"),
    (lambda: dash.attention(_Q, _K, _V, causal="left"), InvalidInputError, "causal='left'"),
    (lambda: dash.attention(_Q, _K, _V, scale=_Q.sum()), InvalidInputError, "float\\(scale\\)"),
    (lambda: dash.attention(_Q, _K, _V, schedule=None), InvalidInputError, "schedule=None"),
    (lambda: dash.attention(_Q, _K, _V, schedule="ascendin"), InvalidInputError, "did you mean"),
    (lambda: dash.attention(_Q, _K, _V, schedule="shift", causal=True), InvalidInputError,
     "not defined for the causal mask"),
])
def test_errors_at_the_call_not_in_the_backward(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_public_functions_are_documented():
    for name in dash.__all__:
        assert inspect.getdoc(getattr(dash, name)).count("\n") > 3


def test_the_graph_node_has_a_name():
    """Profilers and graph viewers ask every node for it; an attribute of ours hid the method."""
    q, k, v, _ = tensors()
    assert "Attention" in dash.attention(q, k, v).grad_fn.name()
