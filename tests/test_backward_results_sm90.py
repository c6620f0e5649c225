"""How dk and dv of the Hopper backwards leave: tensor maps, and copies where no map can be."""

import pytest
from fake_gpu import FakeArray, backward_inputs, fake_gpu

import dashcupy
from dashcupy import params
from dashcupy.arguments import contiguous_strides
from dashcupy.plan import make_plan
from dashcupy.problem import Problem

H200 = (9, 0)
FLOAT16, BFLOAT16 = 6, 9  # CUtensorMapDataType
# Element strides of 1, no interleave, 128-byte swizzle, 128-byte promotion, zeros past the ends.
OPTIONS = ((1, 1, 1, 1), 0, 3, 2, 0)
UNALIGNED = 1 << 47 | 8
# head_dim, kernel, rows of a box of k and v, and of dk and dv
LOOPS = [(64, "bwd_sm90_d64", 128, 128), (128, "bwd_sm90", 128, 64),
         (192, "bwd_sm90_d192", 96, 96), (256, "bwd_sm90_d256", 64, 64)]
MAPS = tuple(name for name, _ in params.FIELDS["backward_maps"])


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def shapes_of(head_dim, q_len=300, kv_len=500):
    """Of q and of k: 8 q heads on 2 kv heads."""
    return (2, q_len, 8, head_dim), (2, kv_len, 2, head_dim)


def unaligned_plan(head_dim=128, q_len=300, kv_len=500, dtype="bfloat16"):
    return make_plan(Problem(2, q_len, kv_len, 8, 2, head_dim, dtype, "full", 0.125), "backward",
                     H200, "auto", False)


def map_of(pointer, shape, strides, rows, data_type=BFLOAT16):
    """The map of a [batch, len, heads, head_dim] array, strides in elements, as it is recorded."""
    batch, length, n_head, head_dim = shape
    return (pointer, data_type, (head_dim, length, n_head, batch),
            tuple(2 * strides[axis] for axis in (1, 2, 0)), (64, rows, 1, 1), OPTIONS)


def place_in(fields, name):
    """Pointer and strides in elements that a struct has for an array."""
    return fields[name], [fields[f"{name}_strides.{axis}"] for axis in ("batch", "row", "head")]


def main_of(gpu):
    found, = (launch for launch in gpu.launches if launch.kernel.startswith("bwd_sm90"))
    return found


@pytest.mark.parametrize("dtype, data_type", [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("head_dim, kernel, key_rows, result_rows", [
    *LOOPS, (8, "bwd_sm90_d64", 128, 128), (72, "bwd_sm90", 128, 64), (96, "bwd_sm90", 128, 64),
    (136, "bwd_sm90_d192", 96, 96), (200, "bwd_sm90_d256", 64, 64)])
def test_boxes(gpu, head_dim, kernel, key_rows, result_rows, dtype, data_type):
    """A box of dk or dv that is too small leaves keys unwritten; with one that is too large what
    lies behind in shared memory lands in the keys of a neighbour."""
    q_shape, k_shape = shapes_of(head_dim)
    x = backward_inputs(q_shape, k_shape, dtype)
    _, dk, dv = dashcupy.attention_backward(**x)
    main = main_of(gpu)
    assert main.kernel == kernel
    rows = {"q": 64, "dout": 64, "k": key_rows, "v": key_rows, "dk": result_rows, "dv": result_rows}
    for name, array in (x | {"dk": dk, "dv": dv}).items():
        if name in rows:
            assert main.fields[f"{name}_map"] == map_of(
                array.data.ptr, array.shape, contiguous_strides(array.shape), rows[name], data_type)
    assert len(gpu.maps) == len(rows) == len(MAPS)


@pytest.mark.parametrize("head_dim, kernel, key_rows, result_rows", LOOPS)
def test_keys_that_no_row_sees_are_written(gpu, head_dim, kernel, key_rows, result_rows):
    """If dk and dv ended where k and v do, what was in memory would stay there."""
    q_shape, k_shape = shapes_of(head_dim, 100, 300)
    x = backward_inputs(q_shape, k_shape)
    _, dk, dv = dashcupy.attention_backward(**x, causal="top_left")
    main = main_of(gpu)
    assert main.kernel == kernel and main.fields["kv_len"] == 300
    strides = contiguous_strides(k_shape)
    for name in ("k", "v"):
        assert main.fields[f"{name}_map"] == map_of(
            x[name].data.ptr, (2, 100, 2, head_dim), strides, key_rows)
    for name, result in (("dk", dk), ("dv", dv)):
        assert main.fields[f"{name}_map"] == map_of(result.data.ptr, k_shape, strides, result_rows)


@pytest.mark.parametrize("q_len", [300, 0])
@pytest.mark.parametrize("head_dim, kernel, key_rows, result_rows", LOOPS)
def test_given_strides(gpu, head_dim, kernel, key_rows, result_rows, q_len):
    """Parts of one larger array, heads and keys in either order: written where they are."""
    q_shape, k_shape = shapes_of(head_dim, q_len)
    x, row = backward_inputs(q_shape, k_shape), 2 * head_dim
    dk = FakeArray(k_shape, "bfloat16", strides=(520 * 2 * row, 2 * row, head_dim, 1))
    dv = FakeArray(k_shape, "bfloat16", strides=(501 * row, head_dim, 501 * head_dim, 1))
    dashcupy.attention_backward(**x, grads=(None, dk, dv))
    main = main_of(gpu)
    assert main.kernel == kernel
    assert "copy_rows" not in [launch.kernel for launch in gpu.launches]
    for name, array in (("dk", dk), ("dv", dv)):
        strides = [stride // 2 for stride in array.strides[:3]]
        assert main.fields[f"{name}_map"] == map_of(array.data.ptr, k_shape, strides, result_rows)
        assert place_in(main.fields, name) == (array.data.ptr, strides)


def test_slices_of_one_array(gpu):
    """dv behind dk in every row of one array, as the gradient of packed keys and values has it."""
    q_shape, k_shape = shapes_of(128)
    strides = (500 * 512, 512, 128, 1)
    dk = FakeArray(k_shape, "bfloat16", strides=strides)
    dv = FakeArray(k_shape, "bfloat16", strides=strides, pointer=dk.data.ptr + 512)
    dashcupy.attention_backward(**backward_inputs(q_shape, k_shape), grads=(None, dk, dv))
    for name, array in (("dk", dk), ("dv", dv)):
        assert main_of(gpu).fields[f"{name}_map"] == map_of(array.data.ptr, k_shape, strides, 64)


@pytest.mark.parametrize("q_shape", [(2, 0, 8), (2, 300, 0)], ids=["rows", "heads"])
@pytest.mark.parametrize("head_dim, kernel, key_rows, result_rows", LOOPS)
def test_no_row_of_q(gpu, head_dim, kernel, key_rows, result_rows, q_shape):
    """Zeros in dk and dv are still to be written; no other map can be made of nothing."""
    _, k_shape = shapes_of(head_dim)
    x = backward_inputs((*q_shape, head_dim), k_shape)
    _, dk, dv = dashcupy.attention_backward(**x)
    launch, = gpu.launches
    assert launch.kernel == kernel and gpu.cleared == [(launch.fields["work_counter"], 4)]
    made = {name: map_of(array.data.ptr, k_shape, contiguous_strides(k_shape), result_rows)
            for name, array in (("dk", dk), ("dv", dv))}
    assert {name: launch.fields[f"{name}_map"] for name in MAPS} == dict.fromkeys(MAPS) | made
    assert gpu.maps == [made["dk"], made["dv"]]


def test_copies_of_a_plan():
    """Order of the launches: a copy back that may start early would be of garbage."""
    plan = unaligned_plan()
    base = make_plan(plan.problem, "backward", H200)
    assert plan.fingerprint == base.fingerprint and base.kernels[1].kernel == "bwd_sm90"
    assert [kernel.copies or kernel.kernel for kernel in plan.kernels] == [
        ("q", "q_copy"), ("k", "k_copy"), ("v", "v_copy"), ("dout", "dout_copy"),
        "bwd_preprocess", "bwd_sm90", "bwd_postprocess", ("dk_copy", "dk"), ("dv_copy", "dv")]
    assert [kernel.early for kernel in plan.kernels] == [False] * 5 + [True] * 2 + [False] * 2
    copies = [kernel for kernel in plan.kernels if kernel.copies]
    n_q, n_k = 2 * 300 * 8 // 8, 2 * 500 * 2 // 8  # rows of 8 warps
    assert [kernel.grid for kernel in copies] == [n_q, n_k, n_k, n_q, n_k, n_k]
    assert {(kernel.kernel, kernel.threads, kernel.params) for kernel in copies} == {
        ("copy_rows", 256, "copy")}
    assert {kernel.defines for kernel in copies} == {(
        ("DC_BF16", 1), ("DC_HEAD_DIM", 128), ("DC_PARAMS_BYTES", params.n_bytes("copy")),
        ("DC_WARPS", 8))}


UNDESCRIBED = [(UNALIGNED, (128000, 256, 128)), (None, (500 * 260, 260, 130)),
               (None, (128000, -256, 128))]


@pytest.mark.parametrize("pointer, strides", UNDESCRIBED, ids=["address", "stride", "reversed"])
def test_an_unaligned_result(gpu, pointer, strides):
    """It makes all use copies, dv and the inputs, too: one plan for all that no map describes."""
    q_shape, k_shape = shapes_of(128)
    x = backward_inputs(q_shape, k_shape)
    dk = FakeArray(k_shape, "bfloat16", strides=(*strides, 1), pointer=pointer)
    dv = FakeArray(k_shape, "bfloat16", strides=(500 * 512, 512, 128, 1))
    dq = FakeArray(q_shape, "bfloat16", strides=(300 * 2048, 2048, 128, 1))
    dashcupy.attention_backward(**x, grads=(dq, dk, dv))
    assert [launch.kernel for launch in gpu.launches] == [
        *["copy_rows"] * 4, "bwd_preprocess", "bwd_sm90", "bwd_postprocess", *["copy_rows"] * 2]
    *copied, before, main, after, dk_out, dv_out = gpu.launches
    workspace, plan = gpu.allocated[-1], unaligned_plan()
    assert workspace.shape == (plan.workspace_bytes,)
    places = {name: workspace.data.ptr + plan.region(f"{name}_copy").offset for name in MAPS}
    in_order = {name: list(contiguous_strides(q_shape if name in ("q", "dout") else k_shape)[:3])
                for name in MAPS}

    rows = {"q": 64, "dout": 64, "k": 128, "v": 128, "dk": 64, "dv": 64}
    for name in MAPS:
        assert place_in(main.fields, name) == (places[name], in_order[name])
        shape = q_shape if name in ("q", "dout") else k_shape
        assert main.fields[f"{name}_map"] == map_of(
            places[name], shape, in_order[name], rows[name])
    # These are used where they are.
    assert place_in(main.fields, "out") == (x["out"].data.ptr, [300 * 1024, 1024, 128])
    assert place_in(main.fields, "dq") == (dq.data.ptr, [300 * 2048, 2048, 128])
    assert before.fields == after.fields == {
        name: value for name, value in main.fields.items() if not name.endswith("_map")}

    for launch, name in zip(copied, ("q", "k", "v", "dout")):
        assert place_in(launch.fields, "from") == (x[name].data.ptr, in_order[name])
        assert place_in(launch.fields, "to") == (places[name], in_order[name])
    for launch, name, array in ((dk_out, "dk", dk), (dv_out, "dv", dv)):
        assert place_in(launch.fields, "from") == (places[name], in_order[name])
        assert place_in(launch.fields, "to") == (
            array.data.ptr, [stride // 2 for stride in array.strides[:3]])
        assert [launch.fields[size] for size in ("batch", "len", "n_head")] == [2, 500, 2]


def test_a_known_call_with_another_address(gpu):
    """The launches of a call before, with aligned results, would stop at the map of this one."""
    q_shape, k_shape = shapes_of(128)
    x = backward_inputs(q_shape, k_shape)
    aligned = ["bwd_preprocess", "bwd_sm90", "bwd_postprocess"]
    copied = ["copy_rows"] * 4 + aligned + ["copy_rows"] * 2
    for pointer, expected in ((None, aligned), (UNALIGNED, copied)) * 2:
        gpu.launches.clear()
        dv = FakeArray(k_shape, "bfloat16", pointer=pointer)
        dashcupy.attention_backward(**x, grads=(None, None, dv))
        assert [launch.kernel for launch in gpu.launches] == expected
        if pointer is None:
            assert main_of(gpu).fields["dv_map"].pointer == dv.data.ptr
        else:
            assert gpu.launches[-1].fields["to"] == pointer


@pytest.mark.parametrize("head_dim, kernel, key_rows, result_rows", LOOPS)
def test_an_unaligned_result_and_no_row_of_q(gpu, head_dim, kernel, key_rows, result_rows):
    """The zeros take the way of all results; nothing is there to be copied in."""
    q_shape, k_shape = shapes_of(head_dim, 0)
    x, dk = backward_inputs(q_shape, k_shape), FakeArray(k_shape, "bfloat16", pointer=UNALIGNED)
    _, _, dv = dashcupy.attention_backward(**x, grads=(None, dk, None))
    assert [launch.kernel for launch in gpu.launches] == [kernel, "copy_rows", "copy_rows"]
    main, *copied = gpu.launches
    workspace, plan = gpu.allocated[-1], unaligned_plan(head_dim, 0)
    assert workspace.shape == (plan.workspace_bytes,)
    assert gpu.cleared == [(workspace.data.ptr + plan.region("work_counter").offset, 4)]
    strides = list(contiguous_strides(k_shape)[:3])
    made = {}
    for launch, name, array in zip(copied, ("dk", "dv"), (dk, dv)):
        place = workspace.data.ptr + plan.region(f"{name}_copy").offset
        assert place_in(main.fields, name) == place_in(launch.fields, "from") == (place, strides)
        assert place_in(launch.fields, "to") == (array.data.ptr, strides)
        made[name] = map_of(place, k_shape, strides, result_rows)
    assert {name: main.fields[f"{name}_map"] for name in MAPS} == dict.fromkeys(MAPS) | made


def test_without_keys_nothing_is_copied(gpu):
    """bwd_preprocess reads dout where it is, and writes all of dq."""
    q_shape, k_shape = shapes_of(128, 300, 0)
    x = backward_inputs(q_shape, k_shape)
    x["dout"] = FakeArray(q_shape, "bfloat16", strides=(300 * 1040, 1040, 130, 1))
    dashcupy.attention_backward(**x)
    launch, = gpu.launches
    assert launch.kernel == "bwd_preprocess" and not gpu.maps
    assert place_in(launch.fields, "dout") == (x["dout"].data.ptr, [300 * 1040, 1040, 130])
