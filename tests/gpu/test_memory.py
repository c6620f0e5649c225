"""Where arrays lie must not matter: strides, what is around them, far offsets, dirty workspace."""

import dashcupy
import pytest
from dashcupy.problem import CAUSAL_OF_MASK

from .support import (
    DEVICE,
    HEAD_DIMS,
    NAMES,
    Case,
    backward,
    expect_same_bits,
    from_cupy,
    run,
    torch,
)

pytestmark = pytest.mark.gpu

_LIKE = {"out": "q", "dq": "q", "dk": "k", "dv": "k"}
_NAN = float("nan")


def _heads_before_rows(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _shifted_by_one(x):
    # The base is aligned to 2 bytes only.
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)


def _odd_rows(x):
    # The base is aligned, rows are not.
    wide = torch.empty(*x.shape[:3], x.shape[3] + 3, dtype=x.dtype, device=x.device)
    return wide[..., :x.shape[3]].copy_(x)


def _batch_innermost_but_one(x):
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("change", [_heads_before_rows, _batch_innermost_but_one, _odd_rows,
                                    _shifted_by_one])
def test_strides_do_not_change_bits(change, head_dim):
    # Strides that a kernel takes for granted, and 16-byte accesses to what is not aligned.
    case = Case(200, 333, "causal", head_dim, batch=2, n_q_head=4, n_kv_head=2)
    inputs = case.draw()
    expected = run(case, inputs)
    changed = {name: change(x) for name, x in inputs.items()}
    expect_same_bits(run(case, changed), expected, change.__name__)
    for name in ("q", "v", "dout"):  # each alone: the others keep their alignment
        expect_same_bits(run(case, inputs | {name: changed[name]}), expected,
                         f"{change.__name__} of {name} alone")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("extra", [0, 1])
def test_slices_of_a_fused_projection(extra, head_dim):
    # q, k, v and the three gradients as slices of one array; one more column: none is aligned.
    case = Case(333, 333, "causal", head_dim, batch=2, n_q_head=4, n_kv_head=4)
    inputs = case.draw()
    expected = run(case, inputs)
    width = 4 * head_dim
    fused, gradients = (torch.full((2, 333, 3 * width + extra), _NAN, dtype=torch.bfloat16,
                                   device=DEVICE) for _ in range(2))

    def slices(x):
        return [x[..., extra + i * width:extra + (i + 1) * width].unflatten(-1, (4, -1))
                for i in range(3)]

    for name, part in zip("qkv", slices(fused)):
        inputs[name] = part.copy_(inputs[name])
    got = run(case, inputs)
    expect_same_bits(got, expected, "slices")
    grads = backward(case, inputs, got["out"], got["lse"], grads=tuple(slices(gradients)))
    expect_same_bits(dict(zip(("dq", "dk", "dv"), grads)), expected, "gradients in slices")
    assert grads[1].data_ptr() == slices(gradients)[1].data_ptr()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_broadcast_arrays(head_dim):
    # Zero strides: dout of a sum, keys that a batch shares.
    case = Case(200, 333, "causal", head_dim, batch=2, n_q_head=4, n_kv_head=2)
    inputs = case.draw()
    inputs["dout"] = inputs["dout"].new_ones(head_dim).expand_as(inputs["dout"])
    inputs["k"] = inputs["k"][:1].expand_as(inputs["k"])
    inputs["v"] = inputs["v"][:, :, :1].expand_as(inputs["v"])
    plain = {name: x.contiguous() for name, x in inputs.items()}
    expect_same_bits(run(case, inputs), run(case, plain), "expanded")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_negative_strides(head_dim):
    # An unsigned or 32-bit stride. torch has no such views, CuPy has.
    cupy = pytest.importorskip("cupy")
    case = Case(200, 333, "full", head_dim, batch=2)
    inputs = case.draw()
    expected = run(case, {name: x.flip(1) for name, x in inputs.items()})
    q, k, v, dout = (cupy.from_dlpack(inputs[name])[:, ::-1] for name in ("q", "k", "v", "dout"))
    out, lse = dashcupy.attention(q, k, v, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse)
    got = {name: from_cupy(x) for name, x in zip(NAMES, (out, lse, *grads))}
    expect_same_bits(got, expected, "reversed rows")


@pytest.mark.parametrize("case", [
    Case(200, 333, "causal", n_q_head=4), Case(333, 200, "full", 40, "float16", n_q_head=4),
    Case(200, 333, "causal", 72, "float16", n_q_head=4), Case(200, 333, "causal", 96, n_q_head=4),
    Case(200, 333, "causal", 128, n_q_head=4),
    *(pytest.param(Case(200, 333, "causal", head_dim, n_q_head=4), marks=pytest.mark.sm90)
      for head_dim in (136, 192, 256))],
    ids=["d64", "d40", "d72", "d96", "d128", "d136", "d192", "d256"])
def test_surroundings_are_neither_read_nor_written(case):
    # NaN before, behind and between rows, heads and batch items: a padded column, row or key that
    # is loaded and multiplied by 0 gives NaN. Results lie in such arrays too.
    case = case.replace(batch=2)
    inputs = case.draw()
    expected = run(case, inputs)
    nan = {name: _in_nan(x.shape, x.dtype) for name, x in inputs.items()}
    results = {name: _in_nan(inputs[like].shape, inputs[like].dtype)
               for name, like in _LIKE.items()}
    results["lse"] = _in_nan(expected["lse"].shape, torch.float32)
    embedded = {name: nan[name][1].copy_(x) for name, x in inputs.items()}
    causal = CAUSAL_OF_MASK[case.mask]
    dashcupy.attention(embedded["q"], embedded["k"], embedded["v"], causal=causal,
                       return_lse=True, out=(results["out"][1], results["lse"][1]))
    backward(case, embedded, results["out"][1], results["lse"][1],
             grads=tuple(results[name][1] for name in ("dq", "dk", "dv")))
    expect_same_bits({name: inner for name, (_, inner) in results.items()}, expected, str(case))
    for name, (whole, inner) in results.items():
        inner.fill_(_NAN)
        assert whole.isnan().all(), f"{name}: written outside"


def _in_nan(shape, dtype):
    """(array full of NaN, view of that shape that touches none of its sides)."""
    margins = [1] * (len(shape) - 1) + [8]  # rows stay aligned to 16 bytes
    whole = torch.full([n + 2 * m for n, m in zip(shape, margins)], _NAN, dtype=dtype,
                       device=DEVICE)
    inner = whole
    for axis, (n, m) in enumerate(zip(shape, margins)):
        inner = inner.narrow(axis, m, n)
    return whole, inner


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", [
    Case(1100, 1100, "causal", n_kv_head=1), Case(650, 1300, "full", n_kv_head=1),
    Case(333, 200, "causal")], ids=["causal", "full", "dead-rows"])
def test_workspace_contents_do_not_matter(case, head_dim):
    # Counters that are taken to be zero (a hang), sums that are added to instead of stored.
    case = case.replace(head_dim=head_dim)
    inputs = case.draw()
    expected = run(case, inputs)
    plan = dashcupy.attention_plan(inputs["q"], inputs["k"], inputs["v"],
                                   causal=CAUSAL_OF_MASK[case.mask], schedule=case.schedule)
    for byte in (0xFF, 0x00, 0x7F, 0x01):
        workspace = torch.full((plan.workspace_bytes,), byte, dtype=torch.uint8, device=DEVICE)
        grads = backward(case, inputs, expected["out"], expected["lse"], workspace=workspace)
        expect_same_bits(dict(zip(("dq", "dk", "dv"), grads)), expected,
                         f"workspace full of 0x{byte:02X}")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fresh_memory_is_filled_with_nan(head_dim):
    # Results and workspace from torch's allocator, which fills all of it with NaN here.
    case = Case(333, 200, "causal", head_dim, n_kv_head=1)
    inputs = case.draw()
    expected = run(case, inputs)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4, device=DEVICE).isnan().all()
        got = run(case, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    expect_same_bits(got, expected, "memory full of NaN")


def test_workspace_that_is_not_pooled():
    # Memory given back before the kernels have run: freed at once here, as there is no pool.
    cupy = pytest.importorskip("cupy")
    case = Case(1100, 1100, "causal", n_kv_head=1)
    inputs = case.draw()
    expected = run(case, inputs)
    torch.cuda.synchronize()

    def fresh(n_bytes):
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(n_bytes), 0)
        memory.memset(0xFF, n_bytes)
        return memory

    with cupy.cuda.using_allocator(fresh):
        q, k, v, dout = (cupy.from_dlpack(inputs[name]) for name in ("q", "k", "v", "dout"))
        out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
        grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True)
        got = {name: from_cupy(x) for name, x in zip(NAMES, (out, lse, *grads))}
        torch.cuda.synchronize()
    expect_same_bits(got, expected, "no pool")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_offsets_beyond_32_bits(head_dim):
    # Element offsets above 2**31 between rows of one item, and between items: 4.4 GB, allocated
    # once. All inputs and results are views of it.
    far = 2**24 + 8  # elements from row to row: 130 rows pass 2**31
    store = torch.empty(131 * far, dtype=torch.bfloat16, device=DEVICE)
    assert store.numel() > 2**31
    row = 2 * head_dim
    rows = Case(130, 130, "causal", head_dim)
    items = rows.replace(batch=2)
    for case, strides in ((rows, (0, far, head_dim, 1)), (items, (2**31, row, head_dim, 1))):
        inputs = case.draw()
        expected = run(case, inputs)
        size = tuple(inputs["q"].shape)
        # Side by side: between rows, or behind the rows of an item.
        step = row if case is rows else 130 * row
        views = [store.as_strided(size, strides, i * step) for i in range(8)]
        apart = {name: views[i].copy_(x) for i, (name, x) in enumerate(inputs.items())}
        out, lse = dashcupy.attention(apart["q"], apart["k"], apart["v"], causal=True,
                                      return_lse=True, out=(views[4], None))
        grads = backward(case, apart, out, lse, grads=tuple(views[5:]))
        expect_same_bits(dict(zip(NAMES, (out, lse, *grads))), expected, f"strides {strides}")
