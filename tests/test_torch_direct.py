"""Calls of the torch layer that go past the dispatcher, and those that somebody else must see."""

import contextlib

import pytest
from dashcupy.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dashcupy.torch as dash  # noqa: E402
from dashcupy.torch import ops  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

NAMES = ["attention", "attention_backward"]


def tensors():
    """q, k and v that require a gradient, and dout."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 9, 2, 8)
    return *[part.clone().requires_grad_() for part in x[:3]], x[3]


def results(q, k, v, dout):
    """out and the gradients."""
    out = dash.attention(q, k, v, causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@pytest.fixture
def dispatched(monkeypatch):
    """Names of the operators that the layer has called through the dispatcher."""
    seen = []

    def operator(name, call):
        return lambda *arguments: seen.append(name) or call(*arguments)

    monkeypatch.setattr(ops, "OPERATORS", {
        name: operator(name, call) for name, call in ops.OPERATORS.items()})
    return seen


def test_a_plain_call_goes_past_the_dispatcher(dispatched):
    """Else each direction pays for it twice."""
    found = results(*tensors())
    q, k, v, dout = tensors()
    with torch.no_grad():
        dash.attention(torch.nn.Parameter(q), k, v)
    with torch.autocast("cpu", torch.bfloat16):
        dash.attention(q, k, v).sum().backward()
    dash.attention(q, k, v, return_lse=True)[1].square().mean().backward()
    assert not dispatched
    with torch.profiler.profile():  # the other way, with the same results
        expected = results(*tensors())
    assert dispatched and all(map(torch.equal, found, expected))


class _Calls(TorchDispatchMode):
    """Names of the operators that a dispatch mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.__name__.removesuffix(".default"))
        return function(*arguments, **(options or {}))


class _Functions(TorchFunctionMode):
    """The same for a function mode."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.names.append(getattr(function, "__name__", "").removesuffix(".default"))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("kind, seen", [(_Calls, NAMES), (_Functions, NAMES[:1])])
def test_modes_see_the_operators(kind, seen):
    """A mode counts, saves or replaces operators: one that it does not see is lost to it.

    PyTorch sets function modes aside in the backward.
    """
    with kind() as mode:
        results(*tensors())
    assert [name for name in mode.names if name in NAMES] == seen


@pytest.mark.parametrize("all_threads", [False, True])
def test_the_profiler_sees_the_operators(all_threads):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with torch.profiler.profile(experimental_config=config) as profile:
        results(*tensors())
    assert {f"dashcupy::{name}" for name in NAMES} <= {event.name for event in profile.events()}


def test_a_trace_keeps_the_operator():
    """The kernel alone would leave a constant in its place."""
    q, k, v, _ = (x.detach() for x in tensors())
    traced = torch.jit.trace(dash.attention, (q, k, v))
    assert "dashcupy::attention" in str(traced.graph)
    assert torch.equal(traced(q * 2, k, v), dash.attention(q * 2, k, v))


class _Named(torch.Tensor):
    """A subclass without words of its own: results are of it, too."""


def test_subclasses_come_back():
    q, k, v, _ = (x.detach() for x in tensors())
    assert type(dash.attention(q.as_subclass(_Named), k, v)) is _Named


def test_negated_memory_is_read_as_its_values():
    q, k, v, _ = (x.detach() for x in tensors())
    assert torch.equal(dash.attention(torch._neg_view(q), k, v), dash.attention(-q, k, v))


def test_zeros_without_memory():
    """PyTorch makes such gradients; what reads memory would find none."""
    q, k, v, dout = tensors()
    out = dash.attention(torch._efficientzerotensor(q.shape), k, v)
    assert torch.equal(out, dash.attention(torch.zeros(q.shape), k, v))
    out.backward(torch._efficientzerotensor(out.shape))
    assert not v.grad.any()


def test_a_wrapper_that_has_left_its_transform():
    """It has no memory of its own, and the type of a plain tensor."""
    q, k, v, _ = (x.detach() for x in tensors())
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    assert torch.equal(dash.attention(kept[0], k, v), dash.attention(q, k, v))


def test_below_autograd_nothing_is_recorded():
    """In the kernel of somebody else's operator, whose own autograd has recorded it already."""
    q, k, v, _ = tensors()
    with torch._C._AutoDispatchBelowAutograd():
        assert not dash.attention(q, k, v).requires_grad


def test_what_a_transform_does_not_wrap_is_recorded_around_it():
    q, k, v, _ = tensors()
    inner = torch.func.grad(lambda x: (dash.attention(q, k, v) * x).sum())(torch.ones(()))
    expected, = torch.autograd.grad(dash.attention(q, k, v).sum(), q)
    assert torch.equal(torch.autograd.grad(inner, q)[0], expected)


def test_a_tangent_is_refused():
    """The kernel would drop it without a word."""
    q, k, v, _ = (x.detach() for x in tensors())
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no forward-mode"):
        dash.attention(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("around", [
    contextlib.nullcontext, torch.autograd.set_detect_anomaly,
    lambda *_: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    lambda *_: torch.autograd.set_multithreading_enabled(False),
], ids=["nothing", "anomaly", "saved tensors", "one thread"])
def test_what_autograd_has_around_it(around):
    expected = results(*tensors())
    with around(True):
        found = results(*tensors())
    assert all(map(torch.equal, found, expected))
