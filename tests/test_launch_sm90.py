"""What the Hopper forward is told: tensor maps, struct, copies and counters, on a recording GPU."""

import itertools

import numpy as np
import pytest
from fake_frameworks import FakeTensor, install_torch
from fake_gpu import COUNTERS, FakeArray, fake_gpu

import dashcupy
from dashcupy import call, counters, tensor_map
from dashcupy.arguments import contiguous_strides
from dashcupy.errors import DeviceError, UnsupportedError
from dashcupy.layout import Layout

Q, K, LSE = (2, 300, 8, 64), (2, 500, 2, 64), (2, 8, 300)
# Element strides of 1, no interleave, 128-byte swizzle, 128-byte promotion, zeros past the ends.
OPTIONS = ((1, 1, 1, 1), 0, 3, 2, 0)
UNALIGNED = 1 << 44 | 8


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def arrays_of(q=None, k=None, v=None, dtype="float16"):
    return [FakeArray(shape, dtype) if x is None else x
            for x, shape in zip((q, k, v), (Q, K, K))]


def test_struct_and_maps(gpu):
    """Every field: a swapped pointer, axis or stride is silent garbage."""
    q, k, v = arrays_of(k=FakeArray(K, strides=(64 * 2000, 256, 128, 1)))
    out, lse = dashcupy.attention(q, k, v, causal=True, scale=0.5, return_lse=True)
    launch, = gpu.launches
    assert (launch.kernel, launch.grid, launch.threads) == ("fwd_sm90", 2 * 3 * 8, 384)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (Q, "float16", LSE, "float32")

    def rows(x, length, n_head, row, head, batch, box):
        return (x.data.ptr, 6, (64, length, n_head, 2), (2 * row, 2 * head, 2 * batch),
                (64, box, 1, 1), OPTIONS)

    assert launch.fields == {
        "q_map": rows(q, 300, 8, 512, 64, 300 * 512, 64),
        "k_map": rows(k, 500, 2, 256, 128, 64 * 2000, 128),
        "v_map": rows(v, 500, 2, 128, 64, 500 * 128, 128),
        "out_map": rows(out, 300, 8, 512, 64, 300 * 512, 64),
        "lse": lse.data.ptr, "work_counter": COUNTERS, "lse_batch": 8 * 300, "lse_head": 300,
        "batch": 2, "n_q_head": 8, "n_kv_head": 2, "q_len": 300, "kv_len": 500,
        "mask_offset": 200, "scale_log2": np.float32(0.5 * np.log2(np.e)), "head_group": 16}


def test_a_thread_without_a_context_makes_maps(gpu):
    """Also in a call of a kind seen before: new arrays need new maps, and those a context."""
    dashcupy.attention(*arrays_of())
    gpu.has_context = False
    dashcupy.attention(*arrays_of())
    assert len(gpu.launches) == 2 and gpu.has_context


@pytest.mark.parametrize("head_dim, dtype, box, data_type", [
    (8, "bfloat16", 128, 9), (128, "float16", 128, 6), (192, "bfloat16", 96, 9),
    (256, "bfloat16", 80, 9)])
def test_boxes(gpu, head_dim, dtype, box, data_type):
    """A box of another size lets the kernel wait for bytes that never come."""
    q = FakeArray((1, 300, 2, head_dim), dtype)
    dashcupy.attention(q, q, q)
    fields = gpu.launches[0].fields
    for name, rows in (("q", 64), ("k", box), ("v", box), ("out", 64)):
        found = fields[f"{name}_map"]
        assert found.box == (64, rows, 1, 1) and found.data_type == data_type
        assert found.sizes == (head_dim, 300, 2, 1)


@pytest.mark.parametrize("q_len, kv_len, causal, seen", [
    (200, 333, "top_left", 200), (200, 333, True, 333), (333, 200, "top_left", 200),
    (333, 200, True, 200), (200, 333, False, 333)])
@pytest.mark.parametrize("pointer", [1 << 45, UNALIGNED], ids=["as it is", "copied"])
def test_keys_that_no_row_sees_are_not_loaded(gpu, q_len, kv_len, causal, seen, pointer):
    """P is 0 there, and 0 times a NaN of v is NaN: they must come as zeros."""
    q, k = FakeArray((1, q_len, 2, 64)), FakeArray((1, kv_len, 2, 64))
    dashcupy.attention(q, k, FakeArray((1, kv_len, 2, 64), pointer=pointer), causal=causal)
    main, = (launch for launch in gpu.launches if launch.kernel == "fwd_sm90")
    for name, length in (("q", q_len), ("k", seen), ("v", seen), ("out", q_len)):
        assert main.fields[f"{name}_map"].sizes[1] == length
    assert main.fields["kv_len"] == kv_len
    copied = {launch.fields["len"] for launch in gpu.launches if launch.kernel == "copy_rows"}
    assert copied == ({q_len, kv_len} if pointer == UNALIGNED else set())


def test_without_keys_the_maps_are_of_q(gpu):
    """No map can be made of an empty array; out 0 and lse -inf must be written all the same."""
    q, k = FakeArray((2, 300, 8, 64)), FakeArray((2, 0, 2, 64))
    dashcupy.attention(q, k, k, causal=True)
    fields = gpu.launches[0].fields
    assert fields["k_map"].pointer == fields["v_map"].pointer == q.data.ptr
    assert fields["k_map"].sizes == (64, 300, 8, 2) and fields["kv_len"] == 0


def test_maps_are_made_once_for_an_address(gpu):
    """Making one costs as much as a launch; another address needs another one."""
    q, k, v = arrays_of()
    out = FakeArray(Q)
    for _ in range(3):
        dashcupy.attention(q, k, v, out=out)
    assert len(gpu.maps) == 4
    other = FakeArray(K)
    dashcupy.attention(q, other, v, out=out)
    assert len(gpu.maps) == 5 and gpu.launches[-1].fields["k_map"].pointer == other.data.ptr
    assert gpu.launches[-1].fields["v_map"].pointer == v.data.ptr


@pytest.mark.parametrize("changes, described", [
    ({}, True),
    ({"q": FakeArray(Q, pointer=UNALIGNED)}, False),
    ({"k": FakeArray(K, strides=(500 * 132, 132, 66, 1))}, False),
    ({"v": FakeArray(K, strides=(64000, -128, 64, 1))}, False),
    ({"k": FakeArray(K, strides=(0, 128, 64, 1))}, False),
    ({"k": FakeArray(K, strides=(64000, 64, 500 * 64, 1))}, True),
    ({"v": FakeArray(K, strides=(1 << 40, 128, 64, 1))}, False),
])
def test_which_arrays_are_copied(gpu, changes, described):
    """The driver refuses a map for them, or makes one that reads elsewhere."""
    dashcupy.attention(*arrays_of(**changes))
    names = [launch.kernel for launch in gpu.launches]
    assert names == (["fwd_sm90"] if described else
                     ["copy_rows"] * 3 + ["fwd_sm90", "copy_rows"])


def test_strides_of_short_axes_do_not_count(gpu):
    """An axis of one element may have any stride, also one that the driver would refuse."""
    q = FakeArray((1, 300, 1, 64), strides=(7, 64, 0, 1))
    dashcupy.attention(q, q, q)
    assert gpu.launches[0].fields["q_map"].strides == (128, 16, 16)


def test_copies_lead_through_the_workspace(gpu):
    """From the caller's strides into C order, and out back into the caller's."""
    q = FakeArray(Q, pointer=UNALIGNED)
    k = FakeArray(K, strides=(500 * 132, 132, 66, 1))
    v, out = FakeArray(K), FakeArray(Q, strides=(300 * 520, 520, 65, 1))
    lse = FakeArray(LSE, "float32")
    dashcupy.attention(q, k, v, return_lse=True, out=(out, lse))
    *before, main, after = gpu.launches
    workspace = gpu.allocated[-1]
    rows = [main.fields[f"{name}_map"].pointer for name in ("q", "k", "v", "out")]
    for launch, source, target in zip(before, (q, k, v), rows):
        fields = launch.fields
        assert (fields["from"], fields["to"]) == (source.data.ptr, target)
        assert workspace.data.ptr <= target < workspace.data.ptr + workspace.shape[0]
        for prefix, strides in (("from", np.array(source.strides) // 2),
                                ("to", contiguous_strides(source.shape))):
            assert [fields[f"{prefix}_strides.{axis}"] for axis in ("batch", "row", "head")] == \
                list(strides[:3])
        assert (fields["batch"], fields["len"], fields["n_head"]) == source.shape[:3]
        assert launch.grid == -(-np.prod(source.shape[:3]) // 8) and launch.threads == 256
    assert (after.fields["from"], after.fields["to"]) == (rows[3], out.data.ptr)
    assert after.fields["to_strides.row"] == 520 and after.fields["from_strides.row"] == 512
    assert main.fields["q_map"].strides == (1024, 128, 300 * 1024)
    assert main.fields["lse"] == lse.data.ptr and len(set(rows)) == 4


def test_a_refused_map_names_the_array():
    """A number of the driver alone does not tell which of four arrays it was."""
    class Refuses:
        cuTensorMapEncodeTiled = staticmethod(lambda *arguments: 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_map.driver, "library", lambda: Refuses)
        with pytest.raises(DeviceError, match=r"error 1 for an array of shape \(1, 2, 3, 64\)"):
            tensor_map.encode_rows(4096, Layout((1, 2, 3, 64), (384, 192, 64, 1), "float16"), 64)


def counters_of(gpu):
    return [launch.fields["work_counter"] for launch in gpu.launches]


def test_each_launch_has_a_counter_of_its_own(gpu):
    """Two launches at a time on one counter would leave q tiles out."""
    for _ in range(3):
        dashcupy.attention(*arrays_of(), causal=True)
    assert counters_of(gpu) == [COUNTERS, COUNTERS + 8, COUNTERS + 16]
    dashcupy.attention(*arrays_of())
    assert counters_of(gpu)[-1] == 0  # q tiles of the full mask are taken in turn


def test_without_memory_for_counters(gpu):
    """The pools of the frameworks may hold all memory; the bits do not need a counter."""
    def refuse(n_bytes):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    runtime = gpu.cupy.cuda.runtime
    malloc, runtime.malloc = runtime.malloc, refuse
    dashcupy.attention(*arrays_of(), causal=True)
    runtime.malloc = malloc
    dashcupy.attention(*arrays_of(), causal=True)
    assert counters_of(gpu) == [0, COUNTERS + 8]


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_recorded_launches_keep_their_counters(gpu, monkeypatch, framework):
    """A replay may run beside any later launch; torch's graphs are graphs as well."""
    install_torch(monkeypatch)
    kind = {"cupy": FakeArray, "torch": FakeTensor}[framework]
    x = [kind(shape) for shape in (Q, K, K)]
    for capturing in (False, True, False, True):
        gpu.capturing = capturing
        dashcupy.attention(*x, causal=True, return_lse=True)
    half = COUNTERS + 8 * counters.N_COUNTER // 2
    assert counters_of(gpu) == [COUNTERS, half, COUNTERS + 8, half + 8]


def test_counters_that_run_out(gpu):
    """Launches go round; graphs do without, as theirs are never free again."""
    found, half = counters.of_device(0), counters.N_COUNTER // 2
    first = found.take(False)
    kept = list(itertools.islice(iter(lambda: found.take(True), 0), half + 1))
    assert len(kept) == len(set(kept)) == half and first not in kept
    assert found.take(True) == 0
    again = [found.take(False) for _ in range(half)]
    assert again[-1] == first and len(set(again)) == half and not set(again) & set(kept)


def test_a_graph_before_any_other_launch_does_without(gpu):
    """Memory cannot be allocated while a graph is recorded."""
    gpu.capturing = True
    dashcupy.attention(*arrays_of(), causal=True, return_lse=True)
    assert counters_of(gpu) == [0]


def test_copies_are_refused_in_a_graph(gpu):
    """Their memory would go back to CuPy's pool and be written by the next replay."""
    x = arrays_of(q=FakeArray(Q, pointer=UNALIGNED))
    dashcupy.attention(*x, return_lse=True)
    gpu.capturing = True
    n_launches = len(gpu.launches)
    with pytest.raises(UnsupportedError, match="also give arrays whose addresses and strides are"):
        dashcupy.attention(*x, return_lse=True)
    assert len(gpu.launches) == n_launches
    dashcupy.attention(*arrays_of(), return_lse=True)


@pytest.mark.parametrize("max_ctas, grid", [(None, 32), (7, 7), (100, 32)])
def test_grid(gpu, max_ctas, grid):
    """As many CTAs as are resident take all q tiles; more would start with nothing to do."""
    call.run("forward", tuple(arrays_of()), (None, None), max_ctas=max_ctas)
    assert gpu.launches[0].grid == grid
