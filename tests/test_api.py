"""The public functions on NumPy arrays: values, arguments, preallocated results, refusals."""

import doctest
import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import dashcupy
from dashcupy import schedules
from dashcupy.errors import InvalidInputError, UnsupportedError
from dashcupy.reference import attention_backward_reference, attention_reference

Q, K, LSE = (2, 37, 6, 24), (2, 53, 3, 24), (2, 6, 37)


def draw(dtype=np.float64, q=Q, k=K, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"dout": q, "q": q, "k": k, "v": k}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def both(x, causal=False, **options):
    """out, lse, dq, dk, dv."""
    out, lse = dashcupy.attention(x["q"], x["k"], x["v"], causal=causal, return_lse=True,
                                  scale=options.get("scale"))
    return out, lse, *dashcupy.attention_backward(**x, out=out, lse=lse, causal=causal, **options)


def bytes_of(arrays):
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]


@pytest.mark.parametrize("causal, mask", [
    (False, "full"), (True, "causal"), ("bottom_right", "causal"), ("top_left", "causal_top_left"),
    (np.True_, "causal"), (0, "full")])
def test_values(causal, mask):
    """The wrong triangle, a missing scale, heads of the wrong group: all are seen in float64."""
    x = draw()
    out, lse, dq, dk, dv = both(x, causal)
    truth = (*attention_reference(x["q"], x["k"], x["v"], mask=mask),
             *attention_backward_reference(**x, mask=mask))
    for found, expected in zip((out, lse, dq, dk, dv), truth):
        assert found.shape == expected.shape and found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [0.3, np.float32(0.3), 2, np.int64(2)])
def test_scale(scale):
    """A scale that reaches the forward only, or as a square."""
    x = draw()
    truth = (*attention_reference(x["q"], x["k"], x["v"], scale=float(scale)),
             *attention_backward_reference(**x, scale=float(scale)))
    for found, expected in zip(both(x, scale=scale), truth):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype, lse_dtype", [
    (np.float16, np.float32), (ml_dtypes.bfloat16, np.float32), (np.float32, np.float32),
    (np.float64, np.float64)])
def test_dtypes_of_the_results(dtype, lse_dtype):
    """Results have the dtype of the inputs, lse that of the sums."""
    out, lse, *grads = both(draw(dtype))
    assert lse.dtype == lse_dtype and {out.dtype, *(g.dtype for g in grads)} == {np.dtype(dtype)}


def test_out_alone_is_an_array():
    """Without return_lse there is one result, and it is the same."""
    x = draw(np.float32)
    out = dashcupy.attention(x["q"], x["k"], x["v"])
    assert isinstance(out, np.ndarray)
    assert bytes_of([out]) == bytes_of(both(x)[:1])


def test_results_go_where_they_are_asked_for():
    """Bits do not depend on where they are written; what is given comes back."""
    x = draw(np.float32)
    expected = both(x, True)
    fused = np.full((2, 60, 3, 6, 24), np.nan, np.float32)
    out, dq = fused[:, :37, 0], fused[:, :37, 1]
    lse, dv = np.empty(LSE, np.float32), np.empty(K[::-1], np.float32).T
    found = dashcupy.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True,
                               out=(out, lse))
    assert found[0] is out and found[1] is lse
    grads = dashcupy.attention_backward(**x, out=out, lse=lse, causal=True, grads=(dq, None, dv))
    assert grads[0] is dq and grads[2] is dv
    assert bytes_of((*found, *grads)) == bytes_of(expected)
    assert np.isnan(fused[:, 37:]).all() and np.isnan(fused[:, :, 2]).all()
    alone = np.empty_like(out)
    assert dashcupy.attention(x["q"], x["k"], x["v"], causal=True, out=alone) is alone
    assert bytes_of([alone]) == bytes_of(expected[:1])


def test_strides_do_not_change_bits():
    """Transposed, reversed and broadcast views mean the same as their copies."""
    x = draw(np.float32)
    views = {"q": x["q"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
             "k": x["k"][:, ::-1].copy()[:, ::-1], "v": x["v"].T.copy().T,
             "dout": np.broadcast_to(np.float32(0.5), Q)}
    x["dout"] = np.full(Q, 0.5, np.float32)
    assert bytes_of(both(views)) == bytes_of(both(x))
    assert not views["k"].flags.c_contiguous


def test_inputs_may_be_read_only():
    """What is only read need not be writable."""
    x = draw(np.float32)
    for array in x.values():
        array.flags.writeable = False
    both(x)


@pytest.mark.parametrize("q, k", [
    ((2, 0, 6, 24), K), (Q, (2, 0, 3, 24)), ((0, *Q[1:]), (0, *K[1:])), ((2, 37, 0, 24), K),
    ((2, 37, 0, 24), (2, 53, 0, 24))])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_inputs_give_zeros(q, k, causal):
    """NaN from 0 / 0, an error from a maximum of nothing."""
    out, lse, dq, dk, dv = both(draw(np.float32, q, k), causal)
    assert (out.shape, dq.shape, dk.shape, dv.shape) == (q, q, k, k)
    assert lse.shape == (q[0], q[2], q[1]) and np.all(lse == -np.inf)
    assert not any(a.any() for a in (out, dq, dk, dv))


def test_rows_that_see_no_key():
    """More queries than keys: the first rows are 0 by definition, not NaN and not a mean of v."""
    x = draw(np.float32, (1, 9, 1, 8), (1, 4, 1, 8))
    out, lse, dq, dk, dv = both(x, True)
    assert not out[:, :5].any() and np.all(lse[:, :, :5] == -np.inf) and not dq[:, :5].any()
    assert out[:, 5:].all() and np.isfinite(lse[:, :, 5:]).all()
    alone = {name: x[name][:, 5:] if name in ("q", "dout") else x[name] for name in x}
    np.testing.assert_allclose(dk, both(alone, True)[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_schedule_computes_the_same_gradients(mask):
    """A schedule orders a sum; it must not change what is summed."""
    x = draw(np.float64, (1, 600, 1, 8), (1, 700, 1, 8))
    results = {name: both(x, mask == "causal", schedule=name) for name in schedules.names()
               if schedules.supports(name, mask)}
    auto = both(x, mask == "causal")
    for found in results.values():
        for a, b in zip(found, auto):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    plan = dashcupy.attention_plan(x["q"], x["k"], x["v"], causal=mask == "causal")
    assert bytes_of(results[plan.schedule]) == bytes_of(auto)


def arguments(**changes):
    """Arguments of the backward, with arrays of another dtype, shape or kind."""
    x = draw(np.float32)
    x |= {"out": np.zeros(Q, np.float32), "lse": np.zeros(LSE, np.float32)}
    return x | {name: change(x[name]) if callable(change) else change
                for name, change in changes.items()}


@pytest.mark.parametrize("changes, message", [
    ({"q": lambda a: a[0]}, r"q has shape \(37, 6, 24\), expected \[batch, q_len, n_q_head, head"),
    ({"k": lambda a: a.transpose(0, 2, 1, 3)}, r"v has shape .* = \(2, 3, 53, 24\)"),
    ({"k": lambda a: a[:1]}, r"k has shape \(1, 53, 3, 24\).* = \(2, any, any, 24\)"),
    ({"v": lambda a: a[..., :8]}, r"v has shape .* = \(2, 53, 3, 24\)"),
    ({"k": lambda a: a[:, :, :0], "v": lambda a: a[:, :, :0]}, "k and v have 0 heads for 6 q"),
    ({"k": lambda a: np.repeat(a, 2, 2)[:, :, :4], "v": lambda a: np.repeat(a, 2, 2)[:, :, :4]},
     "q has 6 heads and k, v have 4: .*multiple"),
    ({"out": lambda a: a[:, 1:]}, "out has shape"),
    ({"dout": lambda a: a.transpose(0, 2, 1, 3)}, "dout has shape"),
    ({"lse": lambda a: a.transpose(0, 2, 1)}, r"lse has shape .*\[batch, n_q_head, q_len\]"),
    ({"lse": lambda a: a.astype(np.float64)}, "lse has dtype float64, expected float32"),
    ({"v": lambda a: a.astype(np.float16)}, "v has dtype float16, expected float32"),
    ({"q": lambda a: a.astype(np.int32)}, "q has dtype int32"),
    ({"q": lambda a: a.astype(np.complex64)}, "q has dtype complex64"),
    ({"dout": 1.0}, "dout is a builtins.float, not an array"),
    ({"lse": None}, "lse is a builtins.NoneType, not an array"),
    ({"causal": "upper"}, "causal='upper' is not known.*bottom_right.*top_left"),
    ({"causal": np.ones((37, 53), bool)}, "causal=array"),
    ({"scale": 0.0}, "scale=0.0: must be a finite number > 0"),
    ({"scale": math.nan}, "scale=nan"),
    ({"scale": 10**400}, "scale=inf: must be a finite number"),
    ({"scale": 1e39}, r"scale=1e\+39: float32 is computed in float32"),
    ({"scale": 1e-46}, "scale=1e-46: float32 .* from 2.*-126 to"),
    ({"scale": -1}, "scale=-1.0"),
    ({"scale": "1"}, "scale is a str"),
    ({"scale": np.ones(1)}, "scale is a ndarray"),
    ({"schedule": "shft"}, "schedule='shft' is not known.*did you mean 'shift'"),
    ({"schedule": None}, "schedule=None is not known"),
    ({"schedule": ["shift"]}, "schedule=.'shift'.* is not known"),
    ({"schedule": "symmetric_shift"}, "symmetric_shift.* not defined for the full mask"),
    ({"schedule": "shift", "causal": True}, "shift.* not defined for the causal mask"),
    ({"grads": np.zeros(Q)}, r"grads must be None or a tuple \(dq, dk, dv\)"),
    ({"grads": (None, None)}, r"grads must be None or a tuple \(dq, dk, dv\)"),
    ({"grads": (np.zeros(K, np.float32), None, None)}, "dq has shape"),
    ({"grads": (None, np.zeros(K, np.float64), None)}, "dk has dtype float64"),
    ({"grads": (None, None, np.broadcast_to(np.zeros(24, np.float32), K))}, "dv is read-only"),
])
def test_wrong_arguments(changes, message):
    """Each is refused with what was given, what is allowed, and what to do."""
    with pytest.raises(InvalidInputError, match=message):
        dashcupy.attention_backward(**arguments(**changes))


def test_results_that_share_memory_are_refused():
    """Writing a gradient over an input that is still read gives garbage for the rest."""
    x = arguments()
    block = np.zeros((2, 53, 3, 48), np.float32)
    dk, dv = block[..., :24], block[..., 24:]  # side by side: allowed
    dashcupy.attention_backward(**x, grads=(None, dk, dv))
    for grads, message in [
            ((x["q"], None, None), "dq shares memory with q"),
            ((None, x["v"][::-1], None), "dk shares memory with v"),
            ((x["dout"], None, None), "dq shares memory with dout"),
            ((None, dk, block[..., 23:47]), "dk shares memory with dv")]:
        with pytest.raises(InvalidInputError, match=message):
            dashcupy.attention_backward(**x, grads=grads)
    itself = np.lib.stride_tricks.as_strided(np.zeros(K, np.float32), K, (15264, 0, 96, 4))
    with pytest.raises(InvalidInputError, match="several of its elements lie at one address"):
        dashcupy.attention_backward(**x, grads=(None, itself, None))
    with pytest.raises(InvalidInputError, match="out shares memory with k"):
        dashcupy.attention(x["k"].copy(), x["k"], x["v"], out=x["k"])


@pytest.mark.parametrize("options, message", [
    ({"out": (None, None)}, "out is a tuple, which goes with return_lse=True"),
    ({"out": np.zeros(Q), "return_lse": True}, r"out must be None or a tuple \(out, lse\)"),
    ({"out": np.zeros(K, np.float32)}, "out has shape"),
    ({"out": (None, np.zeros(LSE, np.float16)), "return_lse": True}, "lse has dtype float16"),
])
def test_wrong_out(options, message):
    """As for every argument."""
    x = draw(np.float32)
    with pytest.raises(InvalidInputError, match=message):
        dashcupy.attention(x["q"], x["k"], x["v"], **options)


def test_workspace_on_the_cpu():
    """A script that is tried out on the CPU must not fail on the GPU only."""
    x = draw(np.float32)
    assert dashcupy.attention_plan(x["q"], x["k"], x["v"]).workspace_bytes == 0
    for n_bytes in (0, 5):
        assert bytes_of(both(x, workspace=np.empty(n_bytes, np.uint8))) == bytes_of(both(x))
    for wrong, message in (
            (np.empty(8, np.float32), "dtype float32: must be one contiguous axis of at least 0"),
            (np.empty((2, 8), np.uint8), r"shape \(2, 8\)"),
            (np.empty(8, np.uint8)[::2], r"strides \(2,\)"), ("8", "workspace is a builtins.str"),
            (np.zeros(8, np.uint8).view(np.ma.MaskedArray), "workspace is a masked array")):
        with pytest.raises(InvalidInputError, match=message):
            both(x, workspace=wrong)


def test_plan():
    """A plan names what a call would do, for either direction."""
    x = draw(np.float32)
    plan = dashcupy.attention_plan(x["q"], x["k"], x["v"], causal="top_left", scale=0.5,
                                   schedule="ascending")
    assert plan.direction == "backward" and plan.schedule == "ascending" and plan.target == "cpu"
    assert plan.problem == plan.problem.__class__(2, 37, 53, 6, 3, 24, "float32",
                                                  "causal_top_left", 0.5)
    forward = dashcupy.attention_plan(x["q"], x["k"], x["v"], direction="forward")
    assert forward.direction == "forward" and forward.problem.scale == 1 / math.sqrt(24)
    with pytest.raises(InvalidInputError, match="direction='both' is not known"):
        dashcupy.attention_plan(x["q"], x["k"], x["v"], direction="both")
    with pytest.raises(InvalidInputError, match="did you mean"):
        dashcupy.attention_plan(x["q"], x["k"], x["v"], schedule="shfit")
    for direction in ("backward", "forward"):
        for wrong in ("junk", ["shift"], None):
            with pytest.raises(InvalidInputError, match="is not known"):
                dashcupy.attention_plan(x["q"], x["k"], x["v"], schedule=wrong,
                                        direction=direction)


def test_errors_can_be_caught_as_one_or_as_builtins():
    """Callers know ValueError and NotImplementedError, not our names."""
    assert issubclass(InvalidInputError, (dashcupy.DashcupyError, ValueError))
    assert issubclass(UnsupportedError, dashcupy.DashcupyError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_plan"])
def test_every_parameter_is_documented(name):
    """A docstring that lags behind the signature misleads."""
    function = getattr(dashcupy, name)
    for parameter in inspect.signature(function).parameters:
        assert parameter in function.__doc__.split("Returns")[0]


def test_examples_in_the_docstrings():
    """An example that does not run is worse than none."""
    done = doctest.testmod(dashcupy.api)
    assert done.failed == 0 and done.attempted > 10
