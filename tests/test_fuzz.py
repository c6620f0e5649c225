"""Random problems on the CPU: right values, order of the sums, and mistakes that are refused."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeArray, fake_gpu
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st
from random_problems import SEED, lengths, problems
from test_cpu_bits import schedules_for, sums_and_expected

import dashcupy
from dashcupy import cpu
from dashcupy.arrays import numpy_dtype
from dashcupy.errors import DashcupyError
from dashcupy.problem import CAUSAL_OF_MASK, MASKS, ROW_ARRAYS, Problem
from dashcupy.reference import (
    attention_backward_reference,
    attention_backward_terms,
    attention_backward_yardstick,
    attention_reference,
    attention_yardstick,
    error_report,
)
from dashcupy.schedules import Shape

pytestmark = pytest.mark.filterwarnings("error")

TILES = ((8, 8), (8, 16), (16, 8), (5, 7))  # rows of q and of kv tiles
QUIET = dict(database=None, deadline=None, suppress_health_check=list(HealthCheck))


def _in_nan(x):
    larger = np.full([size + 5 for size in x.shape], np.nan, x.dtype)
    larger[2:-3, 2:-3, 2:-3, 2:-3] = x
    return larger[2:-3, 2:-3, 2:-3, 2:-3]


LAYOUTS = {
    "plain": lambda x: x,
    "heads first": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "columns first": lambda x: x.transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0),
    "reversed": lambda x: x[:, ::-1, ::-1].copy()[:, ::-1, ::-1],
    "in nan": _in_nan,
    "one head for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


def draw_inputs(problem):
    """q, k, v and dout as they are laid out."""
    rng = np.random.default_rng(problem.seed)
    of_q = (problem.batch, problem.q_len, problem.n_q_head, problem.head_dim)
    of_k = (problem.batch, problem.kv_len, problem.n_kv_head, problem.head_dim)
    dtype = numpy_dtype(problem.dtype)
    return [LAYOUTS[layout]((factor * rng.standard_normal(shape)).astype(dtype))
            for layout, shape, factor in zip(problem.layouts, (of_q, of_k, of_k, of_q),
                                             (*[problem.factor] * 3, 1.0))]


@seed(SEED)
@settings(max_examples=300, **QUIET)
@given(problem=problems([(d, dtype) for d in (1, 8, 17, 24) for dtype in
                         ("float16", "bfloat16", "float32", "float64")],
                        tiles=(8, 16, 5, 7), most=40, layouts=tuple(LAYOUTS)),
       tiles=st.sampled_from((*TILES, None)), factor=st.sampled_from((None, 0.0, 1.0, 30.0)))
def test_values(problem, tiles, factor):
    """Whatever is legal is right: no combination of mask, lengths, heads, strides, dtype, dlse."""
    q, k, v, dout = draw_inputs(problem)
    asked = Problem(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], problem.dtype,
                    problem.mask, problem.scale or q.shape[3] ** -0.5)
    if tiles:
        config = SimpleNamespace(q_tile=tiles[0], kv_tile=tiles[1])
        out, lse = cpu.forward(q, k, v, asked, config)
        dlse = _dlse(lse, factor)
        grads = cpu.backward(dout, q, k, v, out, lse, asked, config, problem.schedule, dlse)
    else:
        options = dict(causal=CAUSAL_OF_MASK[problem.mask], scale=problem.scale)
        out, lse = dashcupy.attention(q, k, v, return_lse=True, **options)
        dlse = _dlse(lse, factor)
        grads = dashcupy.attention_backward(dout, q, k, v, out, lse, schedule=problem.schedule,
                                            dlse=dlse, **options)
    options = dict(mask=problem.mask, scale=problem.scale)
    exact = (*attention_reference(q, k, v, **options),
             *attention_backward_reference(dout, q, k, v, dlse=dlse, **options))
    plain = (*attention_yardstick(q, k, v, **options),
             *attention_backward_yardstick(dout, q, k, v, dlse=dlse, **options))
    terms = dict(zip(("dq", "dk"), attention_backward_terms(dout, q, k, v, **options)))
    for name, got, right, fair in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), exact,
                                      plain):
        report = error_report(got, right, fair, factor=2 if name in ("out", "lse") else 3,
                              floor=_floor(got, right), terms=terms.get(name))
        assert report, f"{name}: {report}"
        assert got.dtype == fair.dtype and got.shape == right.shape


def _dlse(lse, factor):
    """Normal numbers times ``factor``, NaN where they are not to be looked at."""
    if factor is None:
        return None
    dlse = factor * np.random.default_rng(lse.size).standard_normal(lse.shape)
    return np.where(lse == -np.inf, np.nan, dlse).astype(lse.dtype)


def _floor(got, right):
    """As the default of `error_report`, in units of the largest value."""
    unit = float(np.abs(right[np.isfinite(right)]).max(initial=1.0))
    return unit * (2.0 ** -40 if got.dtype == np.float64 else 2.0 ** -18)


@seed(SEED)
@settings(max_examples=100, **QUIET)
@given(q_len=lengths((8, 5), 70).filter(bool), kv_len=lengths((8, 16, 7), 100).filter(bool),
       tiles=st.sampled_from(TILES), mask=st.sampled_from(MASKS), group=st.integers(1, 3))
def test_sums_follow_every_schedule(q_len, kv_len, tiles, mask, group):
    """Tile counts that no table of cases has: an order that depends on one that is even, say."""
    offset = kv_len - q_len if mask == "causal" else 0
    shape = Shape(q_len, kv_len, *tiles, mask != "full", offset)
    for name in schedules_for(shape.causal):
        for got, wanted in sums_and_expected(name, shape, group):
            np.testing.assert_array_equal(got, wanted, err_msg=name)


# --- what a GPU would be told --------------------------------------------------------------------

def _strided(shape, dtype, layout):
    """An array on the fake GPU: its strides in elements, and where its memory starts."""
    batch, length, n_head, head_dim = shape
    row = n_head * head_dim
    strides, shift = {
        "plain": ((length * row, row, head_dim, 1), 0),
        "heads first": ((n_head * length * head_dim, head_dim, length * head_dim, 1), 0),
        "wide rows": ((length * (row + 8), row + 8, head_dim, 1), 0),
        "odd rows": ((length * (row + 1), row + 1, head_dim, 1), 0),
        "shifted": ((length * row, row, head_dim, 1), 2),
        "reversed": ((length * row, -row, head_dim, 1), 2 * row * max(length - 1, 0)),
        "one head for all": ((length * row, row, 0, 1), 0),
        "far": ((1 << 33, 1 << 30, head_dim, 1), 0),
    }[layout]
    return FakeArray(shape, dtype, strides=strides, pointer=next(FakeArray._addresses) + shift)


_GPU_LAYOUTS = ("plain", "plain", "heads first", "wide rows", "odd rows", "shifted", "reversed",
                "one head for all", "far")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
@seed(SEED)
@settings(max_examples=100, **QUIET)
@given(problem=problems([(d, dtype) for d in (8, 40, 64, 96, 120, 128)
                         for dtype in ("float16", "bfloat16")],
                        tiles=(64, 128, 192), most=900, layouts=_GPU_LAYOUTS))
def test_launches(capability, problem):
    """An empty grid, a map of nothing, a stride that the copy engine refuses: errors of the driver
    at odd sizes, or results that nobody writes."""
    of_q = (problem.batch, problem.q_len, problem.n_q_head, problem.head_dim)
    of_k = (problem.batch, problem.kv_len, problem.n_kv_head, problem.head_dim)
    with pytest.MonkeyPatch.context() as patch, \
            fake_gpu(patch, compute_capability=capability) as gpu:
        q, k, v, dout = (_strided(shape, problem.dtype, layout) for shape, layout in zip(
            (of_q, of_k, of_k, of_q), problem.layouts))
        options = dict(causal=CAUSAL_OF_MASK[problem.mask], scale=problem.scale)
        out, lse = dashcupy.attention(q, k, v, return_lse=True, **options)
        written = {launch.fields["lse"] for launch in gpu.launches
                   if launch.kernel.startswith("fwd")}
        assert written == ({lse.data.ptr} if 0 not in lse.shape else set())
        gpu.launches.clear()
        grads = dashcupy.attention_backward(dout, q, k, v, out, lse, schedule=problem.schedule,
                                            **options)
        told = [launch.fields for launch in gpu.launches if launch.kernel.startswith("bwd")]
        copied = {launch.fields["from"]: launch.fields["to"] for launch in itertools.takewhile(
            lambda launch: launch.kernel == "copy_rows", reversed(gpu.launches))}
        assert len(copied) in (0, 2)  # dk and dv, last of all
        for name, x in zip(("dq", "dk", "dv"), grads):
            places = {fields[name] for fields in told}
            if copied and name != "dq":
                places = {copied[place] for place in places}
            assert 0 in x.shape or places == {x.data.ptr}
            for fields in told:
                if f"{name}_map" in fields:
                    assert fields[f"{name}_map"].pointer == fields[name]
        spaces = [x for x in gpu.allocated if x.dtype == "uint8"]
        assert not copied or spaces
        for fields in told if spaces else ():
            start, end = spaces[-1].data.ptr, spaces[-1].data.ptr + spaces[-1].shape[0]
            assert all(start <= fields[name] < end or fields[name] == 0 for name in (
                "lse_log2", "delta", "dq_accum", "dq_semaphore", "work_counter"))
            assert all(start <= place < end for place in copied)


# --- mistakes ------------------------------------------------------------------------------------

class _Odd:
    """Something that is no array, number, string or bool."""


def _other_shape(x, size):
    """One axis longer or shorter; not the second, as a longer q is as good."""
    axis = (0, 2, 3)[size % 3] if len(x.shape) == 4 else size % 3
    shape = list(x.shape)
    shape[axis] += 1 if size % 2 or not shape[axis] else -1
    return x.like(shape=shape)


# What may be wrong with one array; the number picks one of several ways.
ARRAY_MISTAKES = {
    "no array": lambda x, n: (None, _Odd(), 3.0, "q", [[1.0]], object)[n % 6],
    "shape": _other_shape,
    "rank": lambda x, n: x.like(shape=x.shape[:-1] if n % 2 else (*x.shape, 1)),
    "dtype": lambda x, n: x.like(dtype=("int32", "float64", "bool", "complex64", "int8")[n % 5]),
    "framework": lambda x, n: x.foreign(),
}
OPTION_MISTAKES = {
    "causal": ("yes", None, 2, 0.5, [True], _Odd()),
    "scale": (0.0, -1.0, float("nan"), float("inf"), "1", [1.0], 1j, 1e-60, _Odd()),
    "schedule": ("", "shfit", None, 1, ["shift"], b"shift", _Odd()),
}


class OnCpu:
    """A NumPy array as the mistakes see it."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def like(self, shape=None, dtype=None):
        return np.zeros(self.shape if shape is None else shape, dtype or self.array.dtype)

    def foreign(self):
        return FakeArray(self.shape, self.array.dtype.name)


class OnGpu:
    """An array on the fake GPU as the mistakes see it."""

    def __init__(self, array):
        self.array, self.shape, self._dtype = array, array.shape, array.dtype.name

    def like(self, shape=None, dtype=None):
        return FakeArray(self.shape if shape is None else shape, dtype or self._dtype)

    def foreign(self):
        return np.zeros(self.shape, self._dtype)


def _arguments(make, direction):
    shapes = {"q": (2, 20, 4, 64), "k": (2, 30, 2, 64), "v": (2, 30, 2, 64)}
    if direction == "backward":
        shapes = {"dout": shapes["q"], **shapes, "out": shapes["q"], "lse": (2, 4, 20),
                  "dlse": (2, 4, 20)}
    return {name: make(shape, "float32" if name in ROW_ARRAYS else "float16")
            for name, shape in shapes.items()}


@pytest.mark.parametrize("place", ["cpu", "gpu"])
@seed(SEED)
@settings(max_examples=150, **QUIET)
@given(data=st.data())
def test_mistakes(place, data):
    """Each ends in an error of ours that names the argument, before anything is launched; and the
    next good call is served."""
    make, wrap = ((np.zeros, OnCpu) if place == "cpu" else (FakeArray, OnGpu))
    with pytest.MonkeyPatch.context() as patch, fake_gpu(patch) as gpu:
        direction = data.draw(st.sampled_from(("forward", "backward")))
        function = {"forward": dashcupy.attention,
                    "backward": dashcupy.attention_backward}[direction]
        good = _arguments(make, direction)
        options = {}
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(good)))
            mistake = data.draw(st.sampled_from(sorted(ARRAY_MISTAKES)))
            wrong = good | {name: ARRAY_MISTAKES[mistake](
                wrap(good[name]), data.draw(st.integers(0, 30)))}
            assume(name != "dlse" or wrong[name] is not None)  # that is allowed
        else:
            names = sorted(OPTION_MISTAKES) if direction == "backward" else ("causal", "scale")
            name = data.draw(st.sampled_from(names))
            wrong, options = good, {name: data.draw(st.sampled_from(OPTION_MISTAKES[name]))}
        with pytest.raises(DashcupyError, match=name if options else r"\b(q|k|v|out|dout|d?lse)\b"):
            function(**wrong, **options)
        assert not gpu.launches and not gpu.allocated
        function(**good)
        assert bool(gpu.launches) == (place == "gpu")
