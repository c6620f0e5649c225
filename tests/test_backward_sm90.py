"""The Hopper backward up to the driver: who gets it, its launches, tensor maps and workspace."""

import ctypes
import shutil
import subprocess

import pytest

import dashcupy
from dashcupy import call, params, source
from dashcupy.config import choose_config
from dashcupy.errors import HangError, InvalidInputError, UnsupportedError
from dashcupy.kernel_launch import KernelLaunch
from dashcupy.plan import make_plan
from dashcupy.problem import Problem

from fake_gpu import FUNCTIONS, STREAM, FakeArray, backward_inputs, fake_gpu

COMPILER = shutil.which("g++") or shutil.which("clang++")
H200 = (9, 0)
Q, K = (2, 300, 8, 128), (2, 500, 2, 128)
BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def problem(**changes):
    values = dict(batch=2, q_len=1000, kv_len=900, n_q_head=4, n_kv_head=2, head_dim=128,
                  dtype="bfloat16", mask="causal", scale=0.125)
    return Problem(**(values | changes))


def arrays(q_shape=Q, k_shape=K, **changes):
    return backward_inputs(q_shape, k_shape) | changes


def names(gpu):
    return [launch.kernel for launch in gpu.launches]


@pytest.mark.parametrize("changes, target, kernel", [
    ({}, H200, "bwd_sm90"), ({"dtype": "float16"}, H200, "bwd_sm90"),
    ({"mask": "full"}, H200, "bwd_sm90"), ({"mask": "causal_top_left"}, H200, "bwd_sm90"),
    ({"scale": 2.0**-20}, H200, "bwd_sm90"), ({"scale": 2.0**20}, H200, "bwd_sm90"),
    ({"scale": 2.0**-20.01}, H200, "bwd_sm80"), ({"scale": 2.0**20.01}, H200, "bwd_sm80"),
    ({"head_dim": 120}, H200, "bwd_sm90"), ({"head_dim": 72}, H200, "bwd_sm90"),
    ({"head_dim": 136}, H200, "bwd_sm90_d192"), ({"head_dim": 192}, H200, "bwd_sm90_d192"),
    ({"head_dim": 200}, H200, "bwd_sm90_d256"), ({"head_dim": 256}, H200, "bwd_sm90_d256"),
    ({"head_dim": 64}, H200, "bwd_sm90_d64"), ({"head_dim": 8}, H200, "bwd_sm90_d64"),
    ({"head_dim": 64, "scale": 2.0**-126}, H200, "bwd_sm90_d64"),
    ({"head_dim": 64, "scale": 2.0**126}, H200, "bwd_sm90_d64"),
    ({"head_dim": 136, "scale": 2.0**-126}, H200, "bwd_sm90_d192"),
    ({"head_dim": 192, "scale": 2.0**126}, H200, "bwd_sm90_d192"),
    ({"head_dim": 64}, (8, 0), "bwd_sm80"), ({"head_dim": 64}, (10, 0), "bwd_sm80"),
    ({}, (8, 0), "bwd_sm80"), ({}, (10, 0), "bwd_sm80"), ({}, (12, 0), "bwd_sm80")])
def test_who_gets_the_kernel(changes, target, kernel):
    """A head_dim that neither has a loop for; a scale at which lse / scale leaves float32."""
    plan = make_plan(problem(**changes), "backward", target)
    assert plan.config.kernel == kernel and kernel in [k.kernel for k in plan.kernels]
    assert f":{kernel}[" in plan.fingerprint


def test_the_choice_is_a_function_of_the_problem():
    """Bits would change with the batch, or with strides, if the kernel did."""
    base = make_plan(problem(), "backward", H200)
    assert ":bwd_sm90[64x128]:cc9.0" in base.fingerprint
    for changes in ({"batch": 1}, {"batch": 0}, {"n_q_head": 64, "n_kv_head": 1}):
        other = make_plan(problem(**changes), "backward", H200)
        assert (other.fingerprint, other.config) == (base.fingerprint, base.config)
    for aligned, debug in ((False, False), (True, True), (False, True)):
        other = make_plan(problem(), "backward", H200, "auto", aligned, debug)
        assert (other.fingerprint, other.config) == (base.fingerprint, base.config)


def test_shared_memory_by_hand():
    """SharedStorage of the layouts: all that a CTA may have, to the byte."""
    k_v, q_dout, ds, dq, rows = 2 * 32768, 4 * 16384, 2 * 16384, 2 * 32768, 2 * 1024
    batches, barriers = 4 * 172, 24 * 8
    assert 226 * 1024 < k_v + q_dout + ds + dq + rows + batches + barriers <= 227 * 1024
    k_v, q_dout, p_ds, dk_dv, rows = 4 * 16384, 8 * 8192, 4 * 16384, 2 * 16384, 8 * 256
    barriers = 29 * 8 + 4 * 4  # and steps left
    assert 226 * 1024 < k_v + q_dout + p_ds + dk_dv + rows + batches + barriers <= 227 * 1024
    for head_dim, n_warp in ((128, 12), (64, 16), (8, 16)):
        config = choose_config(problem(head_dim=head_dim), "backward", H200)
        assert (config.q_tile, config.kv_tile, config.n_warp) == (64, 128, n_warp)
        assert config.smem_bytes == 227 * 1024

    # 96 columns: panels as for 128, but for dq.
    used = 2 * 32768 + 4 * 16384 + 2 * 16384 + 2 * 24576 + 2 * 1024 + batches + 24 * 8
    assert choose_config(problem(head_dim=96), "backward", H200).smem_bytes == \
        -(-used // 1024) * 1024

    # The same of bwd_sm90_d256_layout.cuh, half of whose keys a CTA has: k, v and half of k of the
    # other CTA, two q tiles, three halves of dout, P twice, dS, dS of the other CTA, lse and delta,
    # steps left and the work.
    k_v, q_dout, scores, rows = 5 * 16384, 7 * 16384, 4 * 8192, 4 * 256
    used = k_v + q_dout + scores + rows + batches + 5 * 4 + 38 * 8
    assert choose_config(problem(head_dim=256), "backward", H200).smem_bytes == \
        -(-used // 1024) * 1024

    # And of bwd_sm90_d192_layout.cuh: q, dout, P and dS twice, lse and delta, steps left.
    k_v, q_dout, scores, rows = 2 * 36864, 4 * 24576, 4 * 12288, 4 * 256
    used = k_v + q_dout + scores + rows + batches + 4 * 4 + 34 * 8
    assert choose_config(problem(head_dim=192), "backward", H200).smem_bytes == \
        -(-used // 1024) * 1024


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_maps_lie_where_the_compiler_looks_for_them(tmp_path):
    """Swapped maps would be a silent mixture of q and k."""
    lines = [f'std::printf("{field} %zu\\n", offsetof(BackwardMaps, {field}));'
             for field, _ in params.FIELDS["backward_maps"]]
    lines.append('std::printf("sizeof %zu\\n", sizeof(BackwardMaps));')
    (tmp_path / "offsets.cpp").write_text(
        "#include <cstddef>\n#include <cstdio>\n#include \"params_bwd_sm90.cuh\"\n"
        "int main() {\n" + "\n".join(lines) + "\n}\n")
    program = tmp_path / "offsets"
    subprocess.run([COMPILER, "-std=c++17", "-w", f"-I{source.cuda_root()}", "-o", program,
                    tmp_path / "offsets.cpp"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    compiled = {key: int(value) for key, value in map(str.split, printed.splitlines())}
    assert compiled.pop("sizeof") == params.n_bytes("backward_maps") == 768
    assert compiled == params.offsets("backward_maps")


def test_launches_of_a_plan():
    """Grid, threads and defines of the contract with the three kernels."""
    plan = make_plan(problem(), "backward", H200, "shortest_first", True, True)
    before, main, after = plan.kernels
    assert [k.kernel for k in plan.kernels] == ["bwd_preprocess", "bwd_sm90", "bwd_postprocess"]
    assert before.grid == after.grid == 16 * 2 * 4 and before.threads == after.threads == 256
    assert main.grid == 8 * 2 * 2 and main.persistent and main.threads == 384
    assert main.maps == "backward_maps" and before.maps is None and after.maps is None
    shared = {"DC_HEAD_DIM": 128, "DC_HEAD_DIM_PAD": 128, "DC_Q_TILE": 64, "DC_KV_TILE": 128,
              "DC_CAUSAL": 1, "DC_BF16": 1, "DC_ALIGNED": 1, "DC_SEMAPHORE_STRIDE": 8,
              "DC_ROW_VALUES": 1, "DC_CLUSTER": 1, "DC_UNORDERED": 0,
              "DC_PARAMS_BYTES": params.n_bytes("backward")}
    assert dict(before.defines) == shared and dict(after.defines) == shared | {"DC_DEBUG": 1}
    assert [k.early for k in plan.kernels] == [False, True, True]
    assert dict(main.defines) == shared | {
        "DC_SCHEDULE": "schedules/shortest_first.cuh", "DC_DEBUG": 1, "DC_SMEM_BYTES": 232448}


def test_workspace():
    """Row values take 16 bytes a row and there is no delta; a copy follows what the struct has."""
    rows = 2 * 4 * 16 * 64
    sizes = {"lse_log2": 16 * rows, "dq_accum": 4 * 128 * rows, "dq_semaphore": 2 * 4 * 16 * 32,
             "work_counter": 4}
    for aligned in (True, False):
        plan = make_plan(problem(), "backward", H200, "auto", aligned)
        if not aligned:
            sizes |= {"q_copy": 2 * 2 * 1000 * 4 * 128, "k_copy": 2 * 2 * 900 * 2 * 128,
                      "v_copy": 2 * 2 * 900 * 2 * 128, "dout_copy": 2 * 2 * 1000 * 4 * 128,
                      "dk_copy": 2 * 2 * 900 * 2 * 128, "dv_copy": 2 * 2 * 900 * 2 * 128}
        assert {region.name: region.n_bytes for region in plan.workspace} == sizes
        end = 0
        for region in plan.workspace:
            assert region.offset % 256 == 0 and end <= region.offset < end + 256
            end = region.offset + region.n_bytes
        assert plan.workspace_bytes == end


@pytest.mark.parametrize("changes, kernels, cleared", [
    ({"q_len": 0}, ["bwd_sm90"], ("work_counter",)),
    ({"n_q_head": 0}, ["bwd_sm90"], ("work_counter",)),
    ({"kv_len": 0}, ["bwd_preprocess"], ()),
    ({"batch": 0}, [], ()),
    ({"q_len": 0, "kv_len": 0}, [], ()),
    ({}, ["bwd_preprocess", "bwd_sm90", "bwd_postprocess"], ())])
@pytest.mark.parametrize("aligned", [True, False])
def test_empty_inputs(changes, kernels, cleared, aligned):
    """A grid of 0 is an error; zeros must be written; a counter of garbage loses work."""
    plan = make_plan(problem(**changes), "backward", H200, "auto", aligned)
    before = [(name, f"{name}_copy") for name in ("q", "k", "v", "dout")
              if not aligned and len(kernels) == 3]
    after = [(f"{name}_copy", name) for name in ("dk", "dv")
             if not aligned and "bwd_sm90" in kernels]  # of its zeros, too
    assert [kernel.copies or kernel.kernel for kernel in plan.kernels] == before + kernels + after
    assert all(kernel.grid > 0 for kernel in plan.kernels) and plan.cleared == cleared
    assert [region.name for region in plan.workspace if region.name.endswith("_copy")] == \
        [copy for _, copy in before] + [copy for copy, _ in after]
    assert plan.explain()


def test_struct_and_maps(gpu):
    """Every pointer and map of the three launches: a wrong one is silent garbage."""
    x = arrays()
    dq, dk, dv = dashcupy.attention_backward(**x)
    assert names(gpu) == ["bwd_preprocess", "bwd_sm90", "bwd_postprocess"]
    before, main, after = gpu.launches
    assert before.fields == after.fields == {
        name: value for name, value in main.fields.items() if not name.endswith("_map")}
    assert {launch.stream for launch in gpu.launches} == {STREAM}
    plan = dashcupy.attention_plan(x["q"], x["k"], x["v"])
    workspace = gpu.allocated[-1]
    assert workspace.shape == (plan.workspace_bytes,)
    expected = {name: array.data.ptr for name, array in {**x, "dq": dq, "dk": dk, "dv": dv}.items()}
    expected |= {region.name: workspace.data.ptr + region.offset for region in plan.workspace}
    expected |= {"delta": 0, "report": 0, "q_len": 300, "kv_len": 500, "mask_offset": 0,
                 "dk_strides.row": 256, "dq_strides.row": 1024}
    assert {name: main.fields[name] for name in expected} == expected
    for name, rows, length, n_head in (("q", 64, 300, 8), ("dout", 64, 300, 8),
                                       ("k", 128, 500, 2), ("v", 128, 500, 2),
                                       ("dk", 64, 500, 2), ("dv", 64, 500, 2)):
        made = main.fields[f"{name}_map"]
        assert made.pointer == expected[name] and made.data_type == BFLOAT16
        assert made.sizes == (128, length, n_head, 2) and made.box == (64, rows, 1, 1)
        assert made.strides == (n_head * 256, 256, length * n_head * 256)


@pytest.mark.parametrize("causal, q_len, kv_len, first_row, key_end", [
    (False, 300, 100, 0, 100), (True, 300, 300, 0, 300), (True, 300, 100, 200, 100),
    (True, 100, 300, 0, 300), ("top_left", 300, 100, 0, 100), ("top_left", 100, 300, 0, 100),
    (True, 300, 1, 299, 1), (True, 1, 300, 0, 300), ("top_left", 1, 300, 0, 1)])
def test_maps_hold_what_sees_and_is_seen(gpu, causal, q_len, kv_len, first_row, key_end):
    """NaN in rows that see no key, or in keys that no row sees, would reach dk and dq. All keys get
    their dk and dv."""
    x = arrays((2, q_len, 8, 128), (2, kv_len, 2, 128))
    _, dk, dv = dashcupy.attention_backward(**x, causal=causal)
    fields = gpu.launches[1].fields
    for name in ("q", "dout"):
        assert fields[f"{name}_map"].pointer == x[name].data.ptr + first_row * 8 * 128 * 2
        assert fields[f"{name}_map"].sizes == (128, q_len - first_row, 8, 2)
    for name in ("k", "v"):
        assert fields[f"{name}_map"].pointer == x[name].data.ptr
        assert fields[f"{name}_map"].sizes == (128, key_end, 2, 2)
    for name, result in (("dk", dk), ("dv", dv)):
        assert fields[f"{name}_map"].pointer == result.data.ptr
        assert fields[f"{name}_map"].sizes == (128, kv_len, 2, 2)


@pytest.mark.parametrize("changes", [
    {"q": FakeArray(Q, "bfloat16", pointer=(1 << 44) + 8)},
    {"k": FakeArray(K, "bfloat16", strides=(500 * 260, 260, 130, 1))},
    {"dout": FakeArray(Q, "bfloat16", strides=(0, 0, 0, 1))},
    {"v": FakeArray(K, "bfloat16", strides=(128000, -256, 128, 1))}],
    ids=["address", "stride", "broadcast", "reversed"])
def test_arrays_that_no_map_describes_are_copied(gpu, changes):
    """The driver refuses such a map; bits must be those of aligned arrays."""
    x = arrays(**changes)
    _, dk, dv = dashcupy.attention_backward(**x, causal=True)
    assert names(gpu) == ["copy_rows"] * 4 + ["bwd_preprocess", "bwd_sm90", "bwd_postprocess"] + \
        ["copy_rows"] * 2
    *copies, before, main, after = gpu.launches[:-2]
    workspace = gpu.allocated[-1].data.ptr
    for launch, name in zip(copies, ("q", "k", "v", "dout")):
        assert launch.fields["from"] == x[name].data.ptr
        assert [2 * launch.fields[f"from_strides.{axis}"] for axis in ("batch", "row", "head")] == \
            list(x[name].strides[:3])
        made, shape = main.fields[f"{name}_map"], x[name].shape
        assert made.pointer == launch.fields["to"] and made.pointer > workspace
        assert [2 * launch.fields[f"to_strides.{axis}"] for axis in ("row", "head", "batch")] == \
            list(made.strides) == [shape[2] * 256, 256, shape[1] * shape[2] * 256]
        assert before.fields[name] == made.pointer  # dout is read by bwd_preprocess, too
        assert [2 * before.fields[f"{name}_strides.{axis}"] for axis in ("row", "head", "batch")] \
            == list(made.strides)
    for launch, name, result in zip(gpu.launches[-2:], ("dk", "dv"), (dk, dv)):
        made = main.fields[f"{name}_map"]
        assert launch.fields["from"] == main.fields[name] == made.pointer > workspace
        assert launch.fields["to"] == result.data.ptr and made.strides == (512, 256, 256000)
    assert before.fields["lse_log2"] == workspace and main.fields["delta"] == 0
    assert before.fields == after.fields == {
        name: value for name, value in main.fields.items() if not name.endswith("_map")}


@pytest.mark.parametrize("n_sm, max_ctas, grid", [(132, None, 16), (5, None, 5), (132, 3, 3)])
def test_grid(monkeypatch, n_sm, max_ctas, grid):
    """One CTA an SM: more would wait for a place that only they can free."""
    with fake_gpu(monkeypatch, n_sm=n_sm) as gpu:
        x = arrays()
        call.run("backward", tuple(map(x.get, call.INPUTS["backward"])), (None,) * 3,
                 max_ctas=max_ctas)
        assert gpu.launches[1].grid == grid and gpu.launches[1].smem_bytes == 232448


@pytest.mark.parametrize("n_sm, max_ctas, grid", [
    (132, None, 32), (9, None, 8), (132, 7, 6), (132, 1, 2)])
def test_grid_of_clusters(monkeypatch, n_sm, max_ctas, grid):
    """Two CTAs a work, and never one without the other: as many as the driver says fit."""
    with fake_gpu(monkeypatch, n_sm=n_sm) as gpu:
        x = arrays((2, 300, 8, 256), (2, 500, 2, 256))
        call.run("backward", tuple(map(x.get, call.INPUTS["backward"])), (None,) * 3,
                 max_ctas=max_ctas)
        main = gpu.launches[1]
        assert (main.kernel, main.grid) == ("bwd_sm90_d256", grid)  # 4 kv tiles of 4 heads
        assert {found.box for found in gpu.maps} == {(64, 64, 1, 1)}  # 64 rows of 64 columns
    with fake_gpu(monkeypatch, n_sm=7) as gpu:
        with pytest.raises(UnsupportedError, match="needs 4 clusters of 2 CTAs.*only 3"):
            dashcupy.attention_backward(**x, schedule="shift")
    with fake_gpu(monkeypatch, n_sm=1) as gpu:
        with pytest.raises(UnsupportedError, match="clusters of 2 CTAs, and this GPU .*no room"):
            dashcupy.attention_backward(**x)
        assert not gpu.launches


def test_launches_on_many_streams(monkeypatch):
    """A launch's config is kept for each stream: one that is taken for another's, or written while
    another thread launches, would send a kernel to the wrong stream."""
    with fake_gpu(monkeypatch) as gpu:
        launch = KernelLaunch(FUNCTIONS["bwd_postprocess"], 5, 256, 0, False, True)
        fields = params.pack("backward", {name: 0 for name, _ in params.FIELDS["backward"]})
        arguments = (ctypes.c_char_p * 1)(fields)
        streams = [*range(1, 200), 1, 199]
        assert [launch(stream, arguments) for stream in streams] == [0] * len(streams)
        assert [found.stream for found in gpu.launches] == streams
        assert {(x.kernel, x.grid, x.threads, x.cooperative, x.early) for x in gpu.launches} == {
            ("bwd_postprocess", 5, 256, False, True)}


def test_teams(monkeypatch):
    """CTAs that wait for one another are launched cooperatively, or refused."""
    with fake_gpu(monkeypatch, n_sm=4) as gpu:
        dashcupy.attention_backward(**arrays(), schedule="shift")
        assert [launch.cooperative for launch in gpu.launches] == [False, True, False]
        assert [launch.early for launch in gpu.launches] == [False, True, True]
    with fake_gpu(monkeypatch, n_sm=3) as gpu:
        with pytest.raises(UnsupportedError, match="needs 4 CTAs resident together.*only 3"):
            dashcupy.attention_backward(**arrays(), schedule="shift")
        assert not gpu.launches


def test_debug_builds_report_who_was_stuck(gpu, monkeypatch):
    """The report must lie where the kernel writes it, also with copies behind it."""
    monkeypatch.setenv("DASHCUPY_DEBUG", "1")
    dashcupy.attention_backward(**arrays(dout=FakeArray(Q, "bfloat16", strides=(0, 0, 0, 1))))
    main = gpu.launches[-4]
    assert main.kernel == "bwd_sm90" and gpu.cleared == [(main.fields["report"], 32)]
    gpu.report[:6] = 1, 13 * 5 + 4, 2, 4, 3, 1
    with pytest.raises(HangError, match=r"kv tile 2 .* q tile 4 \(batch 1, q head 5\).*ticket 3"):
        dashcupy.attention_backward(**arrays())
    gpu.report[2] = 2**32 - 1
    with pytest.raises(HangError, match="bwd_postprocess gave up waiting"):
        dashcupy.attention_backward(**arrays())


def test_capture_and_a_workspace_of_the_caller(gpu):
    """Replays need memory that stays; copies that the plan did not count are asked for."""
    gpu.capturing = True
    x = arrays()
    with pytest.raises(UnsupportedError, match="workspace="):
        dashcupy.attention_backward(**x)
    n_bytes = dashcupy.attention_plan(x["q"], x["k"], x["v"]).workspace_bytes
    workspace = FakeArray((n_bytes,), "uint8")
    dashcupy.attention_backward(**x, workspace=workspace)
    assert gpu.launches[-1].fields["lse_log2"] == workspace.data.ptr
    flat = FakeArray(Q, "bfloat16", strides=(0, 0, 0, 1))
    copies = 2 * (2 * 300 * 8 + 4 * 500 * 2) * 128 * 2  # q, dout; k, v, dk, dv
    with pytest.raises(InvalidInputError, match="must be one contiguous axis of at least") as error:
        dashcupy.attention_backward(**x | {"dout": flat}, workspace=workspace)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert needed == -(-n_bytes // 256) * 256 + copies
    dashcupy.attention_backward(**x | {"dout": flat}, workspace=FakeArray((needed,), "uint8"))


def test_maps_are_made_once_for_an_address(gpu):
    """Encoding takes longer than a launch; another address needs another map."""
    x, (dq, dk, dv) = arrays(), (FakeArray(shape, "bfloat16") for shape in (Q, K, K))
    for _ in range(2):
        dashcupy.attention_backward(**x, grads=(dq, dk, dv))
        assert len(gpu.maps) == 6
    v, other = FakeArray(K, "bfloat16"), FakeArray(K, "bfloat16")
    dashcupy.attention_backward(**x | {"v": v}, grads=(dq, dk, dv))
    assert len(gpu.maps) == 7 and gpu.launches[-2].fields["v_map"].pointer == v.data.ptr
    dashcupy.attention_backward(**x, grads=(dq, other, dv))
    assert len(gpu.maps) == 8
    assert [gpu.launches[-2].fields[f"{name}_map"].pointer for name in ("v", "dk", "dv")] == [
        array.data.ptr for array in (x["v"], other, dv)]
