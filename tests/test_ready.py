"""Calls that are known again: what addresses and flags decide is looked at every time."""

import gc
import weakref

import numpy as np
import pytest
from fake_frameworks import FakeTensor, install_torch
from fake_gpu import FakeArray, fake_gpu

import dashcupy
from dashcupy import arrays, ready
from dashcupy.errors import InvalidInputError

SHAPE, LSE = (1, 200, 2, 64), (1, 2, 200)


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def backward(kind=FakeArray, **options):
    """One backward of new arrays."""
    x = {name: kind(SHAPE) for name in ("dout", "q", "k", "v", "out")}
    return dashcupy.attention_backward(**x, lse=kind(LSE, "float32"), **options)


@pytest.mark.parametrize("kind", [FakeArray, FakeTensor])
def test_a_call_is_known_again(gpu, monkeypatch, kind):
    """Else every call costs as much as the first; what is known must name its own addresses."""
    install_torch(monkeypatch)
    first = backward(kind)
    monkeypatch.setattr(arrays, "borrow_all", None)  # the way of a call that is not known
    second = backward(kind)
    assert len(ready._known) == 1
    addresses = [x.data.ptr if kind is FakeArray else x.data_ptr() for x in (*first, *second)]
    assert len(set(addresses)) == 6
    fields = [gpu.launches[i].fields[name] for i in (1, 3) for name in ("dq", "dk", "dv")]
    assert fields == addresses
    assert gpu.launches[1].fields["q_strides.row"] == gpu.launches[3].fields["q_strides.row"] == 128
    assert gpu.launches[1].fields["dq_accum"] != gpu.launches[3].fields["dq_accum"]


def test_every_argument_makes_another_call(gpu, monkeypatch):
    """A launch of the call before would ignore mask, scale, schedule, GPU, dtype or strides."""
    q, k, v = (FakeArray(SHAPE) for _ in range(3))
    dashcupy.attention(q, k, v)
    variants = [
        ((q, k, v), {"causal": True}), ((q, k, v), {"causal": "top_left"}),
        ((q, k, v), {"scale": 0.5}), ((q, k, v), {"out": FakeArray(SHAPE)}),
        ([FakeArray(SHAPE, device=1) for _ in range(3)], {}),
        ([FakeArray(SHAPE, "bfloat16") for _ in range(3)], {}),
        ((q, FakeArray(SHAPE, strides=(200 * 256, 256, 64, 1)), v), {}),
        ((q, FakeArray((1, 100, 2, 64)), FakeArray((1, 100, 2, 64))), {}),
    ]
    for count, (inputs, options) in enumerate(variants, 2):
        dashcupy.attention(*inputs, **options)
        assert len(ready._known) == count
    backward()
    backward(schedule="descending")
    monkeypatch.setenv("DASHCUPY_DEBUG", "1")
    backward()
    assert len(ready._known) == len(variants) + 4


def test_addresses_of_known_calls_are_checked(gpu):
    """A kernel for aligned arrays stops the context on others; results over inputs are garbage."""
    q, k, v, out = (FakeArray(SHAPE) for _ in range(4))
    for _ in range(2):
        dashcupy.attention(q, k, v, out=out)
    assert [launch.kernel for launch in gpu.launches] == ["fwd_sm90"] * 2
    dashcupy.attention(FakeArray(SHAPE, pointer=(1 << 44) + 8), k, v, out=out)
    copied = ["copy_rows"] * 3 + ["fwd_sm90", "copy_rows"]
    assert [launch.kernel for launch in gpu.launches[2:]] == copied
    with pytest.raises(InvalidInputError, match="no multiple of its element's size"):
        dashcupy.attention(FakeArray(SHAPE, pointer=(1 << 44) + 1), k, v, out=out)
    n_launches = len(gpu.launches)
    for shared in (q, FakeArray(SHAPE, pointer=v.data.ptr + 160)):
        with pytest.raises(InvalidInputError, match="out shares memory with [qv]"):
            dashcupy.attention(q, k, v, out=shared)
    assert len(gpu.launches) == n_launches


def test_slices_of_one_array_are_known_again(gpu, monkeypatch):
    """Fused gradients interleave, so that only the exact test can tell them apart."""
    def grads(fused, *heads):
        return tuple(FakeArray(SHAPE, strides=(200 * 384, 384, 64, 1),
                               pointer=fused.data.ptr + 2 * 64 * head) for head in heads)
    backward(grads=grads(FakeArray((1, 200, 6, 64)), 0, 2, 4))
    with pytest.raises(InvalidInputError, match="dk shares memory with dv"):
        backward(grads=grads(FakeArray((1, 200, 6, 64)), 0, 3, 4))
    monkeypatch.setattr(arrays, "borrow_all", None)
    backward(grads=grads(FakeArray((1, 200, 6, 64)), 0, 2, 4))


def test_a_tensor_that_came_to_require_a_gradient_is_refused(gpu, monkeypatch):
    """The same array as before, yet autograd would not see this write."""
    install_torch(monkeypatch)
    q, k, v, out = (FakeTensor(SHAPE) for _ in range(4))
    dashcupy.attention(q, k, v, out=out)
    out.requires_grad = True
    with pytest.raises(InvalidInputError, match="requires a gradient"):
        dashcupy.attention(q, k, v, out=out)


def test_a_negated_tensor_in_a_known_call_is_refused(gpu, monkeypatch):
    """Shape and strides are those of before, but the values in memory have the other sign."""
    install_torch(monkeypatch)
    q, k, v = (FakeTensor(SHAPE) for _ in range(3))
    dashcupy.attention(q, k, v)
    k.negative = True
    with pytest.raises(InvalidInputError, match=r"k is a torch .* give k.resolve_neg\(\)"):
        dashcupy.attention(q, k, v)


def test_other_arrays_in_a_known_call_are_refused(gpu):
    """A quick look must not take them for what was there before."""
    q, k, v = (FakeArray(SHAPE) for _ in range(3))
    dashcupy.attention(q, k, v)
    for wrong, message in ((None, "k is a builtins.NoneType"), (np.zeros(SHAPE), "one framework"),
                           (FakeArray(SHAPE, device=1), "q is on GPU 0 and k on GPU 1")):
        with pytest.raises(InvalidInputError, match=message):
            dashcupy.attention(q, wrong, v)


def test_no_array_is_kept(gpu, monkeypatch):
    """Memory that nobody asked to keep would stay taken for the life of the process."""
    install_torch(monkeypatch)
    for kind in (FakeArray, FakeTensor):
        x = [kind(SHAPE) for _ in range(4)]
        dashcupy.attention(*x[:3], out=x[3])
        kept = [weakref.ref(array) for array in (*x, dashcupy.attention(*x[:3]))]
        x.clear()
        gpu.allocated.clear()
        gc.collect()
        assert [ref() for ref in kept] == [None] * 5


def test_what_is_known_stays_bounded(gpu, monkeypatch):
    """Lengths that never come back must not add up."""
    monkeypatch.setattr(ready, "_MAX_KNOWN", 3)
    for length in range(1, 9):
        dashcupy.attention(*(FakeArray((1, length, 1, 64)) for _ in range(3)))
        assert len(ready._known) <= 3
