"""The names of flash-attn and of PyTorch: same arguments, same results, or a refusal."""

import inspect

import pytest
from dashcupy.errors import InvalidInputError, UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dashcupy.torch as dash  # noqa: E402

F = torch.nn.functional
# flash-attn 2.8, after the arrays; what follows "return_attn_probs" is ours.
FLASH_ARGUMENTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False,
                   "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
                   "deterministic": False, "return_attn_probs": False}
FLASH = {"flash_attn_func": ("q", "k", "v"), "flash_attn_kvpacked_func": ("q", "kv"),
         "flash_attn_qkvpacked_func": ("qkv",)}
# PyTorch 2.13, whose function is built in and has no signature to look at.
SDPA_ARGUMENTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
                  "enable_gqa": False}


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name, arrays, defaults", [
    *[(name, arrays, FLASH_ARGUMENTS) for name, arrays in FLASH.items()],
    ("scaled_dot_product_attention", ("query", "key", "value"), SDPA_ARGUMENTS)])
def test_positional_arguments_are_those_of_the_model(name, arrays, defaults):
    positional = [p for p in inspect.signature(getattr(dash, name)).parameters.values()
                  if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*arrays, *defaults]
    assert {p.name: p.default for p in positional[len(arrays):]} == defaults


@pytest.mark.parametrize("causal", [False, True])
def test_packed_results_and_gradients_are_those_of_the_parts(causal):
    """A gradient in the wrong slice, or summed over a slice twice."""
    qkv, dout = randn(2, 9, 3, 4, 8).requires_grad_(), randn(2, 9, 4, 8)
    parts = [x.clone().detach().requires_grad_() for x in qkv.unbind(2)]
    out = dash.flash_attn_func(*parts, causal=causal, softmax_scale=0.5)
    expected = torch.stack(torch.autograd.grad(out, parts, dout), 2)
    packed = dash.flash_attn_qkvpacked_func(qkv, causal=causal, softmax_scale=0.5)
    assert torch.equal(packed, out)
    assert torch.equal(torch.autograd.grad(packed, qkv, dout)[0], expected)

    q, kv = parts[0], qkv[:, :, 1:].detach().requires_grad_()
    packed = dash.flash_attn_kvpacked_func(q, kv, causal=causal, softmax_scale=0.5)
    dq, dkv = torch.autograd.grad(packed, (q, kv), dout)
    assert torch.equal(torch.cat((dq[:, :, None], dkv), 2), expected)


def test_kvpacked_with_fewer_heads_and_another_length():
    q, kv, dout = randn(2, 5, 4, 8).requires_grad_(), randn(2, 9, 2, 2, 8), randn(2, 5, 4, 8)
    kv.requires_grad_()
    out = dash.flash_attn_kvpacked_func(q, kv, causal=True)
    expected = dash.attention(q, kv[:, :, 0], kv[:, :, 1], causal=True)
    assert torch.equal(out, expected)
    for x, y in zip(torch.autograd.grad(out, (q, kv), dout),
                    torch.autograd.grad(expected, (q, kv), dout)):
        assert torch.equal(x, y)


def test_probabilities_are_three_values():
    q = randn(1, 5, 2, 8)
    out, lse, mask = dash.flash_attn_func(q, q, q, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, q) / 8**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert torch.equal(out, dash.flash_attn_func(q, q, q, deterministic=True))
    assert mask.numel() == 0


@pytest.mark.parametrize("name, value", [
    ("dropout_p", 0.1), ("window_size", (256, 0)), ("softcap", 30.0),
    ("alibi_slopes", torch.ones(2))])
@pytest.mark.parametrize("function", FLASH)
def test_flash_arguments_that_are_not_served_are_named(function, name, value):
    arrays = {"q": randn(1, 5, 2, 8), "k": randn(1, 5, 2, 8), "v": randn(1, 5, 2, 8),
              "kv": randn(1, 5, 2, 2, 8), "qkv": randn(1, 5, 3, 2, 8)}
    arrays = [arrays[array] for array in FLASH[function]]
    with pytest.raises(UnsupportedError, match=f"^{function}: {name} is "):
        getattr(dash, function)(*arrays, **{name: value})
    neutral = FLASH_ARGUMENTS[name]
    given = list(neutral) if name == "window_size" else neutral  # a list is as good as a tuple
    assert getattr(dash, function)(*arrays, **{name: given}).shape == (1, 5, 2, 8)


def test_packed_shapes_are_checked():
    with pytest.raises(InvalidInputError, match="qkv has shape .*q, k, v side by side"):
        dash.flash_attn_qkvpacked_func(randn(1, 5, 2, 2, 8))
    with pytest.raises(InvalidInputError, match="kv has shape .*k, v side by side"):
        dash.flash_attn_kvpacked_func(randn(1, 5, 2, 8), randn(1, 5, 2, 8))


def test_deterministic_refuses_a_schedule_that_is_not():
    q = randn(1, 5, 2, 8)
    dash.flash_attn_func(q, q, q, schedule="unordered")
    with pytest.raises(UnsupportedError, match="deterministic=True was given"):
        dash.flash_attn_func(q, q, q, deterministic=True, schedule="unordered")


@pytest.mark.parametrize("shapes, options", [
    (((2, 4, 5, 8), (2, 4, 9, 8)), {"is_causal": True}),
    (((2, 4, 9, 8), (2, 4, 5, 8)), {"is_causal": True}),
    (((2, 4, 9, 8), (2, 2, 5, 8)), {"enable_gqa": True, "scale": 0.3}),
    (((3, 5, 8), (3, 9, 8)), {"is_causal": True}),
], ids=["wide", "tall", "gqa", "three axes"])
def test_sdpa_is_that_of_pytorch(shapes, options):
    """Top-left alignment of the causal mask, whatever the lengths."""
    q, k, v = (randn(*shape).requires_grad_() for shape in (shapes[0], shapes[1], shapes[1]))
    found, expected = (function(q, k, v, **options) for function in (
        dash.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    dout = randn(*shapes[0])
    for x, y in zip(torch.autograd.grad(found, (q, k, v), dout),
                    torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options, error, words", [
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, UnsupportedError, "attn_mask is a tensor"),
    ({"dropout_p": 0.1}, UnsupportedError, "dropout_p is 0.1"),
    (dict.fromkeys(("key", "value"), randn(2, 2, 5, 8)), InvalidInputError, "enable_gqa=True"),
    ({"value": randn(2, 5, 8)}, InvalidInputError, "must all be"),
    ({"query": randn(2, 5, 4, 8).numpy()}, InvalidInputError, "query is a numpy.ndarray"),
    # In the caller's order of axes and names, not in those of the kernels.
    ({"key": randn(2, 4, 7, 8)}, InvalidInputError, r"key \(2, 4, 7, 8\), value .*one shape"),
    ({"query": randn(2, 4, 5, 16)}, InvalidInputError, r"query \(2, 4, 5, 16\), .*one head_dim"),
    ({"query": randn(1, 4, 5, 8)}, InvalidInputError, r"query \(1, 4, 5, 8\), .*one batch"),
    ({"query": randn(2, 6, 5, 8), "enable_gqa": True}, InvalidInputError,
     r"query \(2, 6, 5, 8\), key .*heads of query \(axis 1\) must be a multiple"),
    ({name: randn(2, 5, 8) for name in ("query", "key")} | {"value": randn(2, 6, 8)},
     InvalidInputError, r"value \(2, 6, 8\): must have"),
])
def test_sdpa_refusals(options, error, words):
    arguments = {name: randn(2, 4, 5, 8) for name in ("query", "key", "value")} | options
    with pytest.raises(error, match=words):
        dash.scaled_dot_product_attention(**arguments)
