"""What reaches the driver: struct, grid, stream, device and errors, on a GPU that records it."""

import numpy as np
import pytest

import dashcupy
from dashcupy import arrays, call
from dashcupy.errors import DeviceError, HangError, InvalidInputError, UnsupportedError
from dashcupy.launch import check_report, used_strides
from dashcupy.plan import make_plan

from fake_frameworks import FakeTensor, Foreign, install_torch
from fake_gpu import GLOBAL, STREAM, FakeArray, fake_gpu

Q, K, LSE = (2, 300, 8, 64), (2, 500, 2, 64), (2, 8, 300)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that runs the portable kernels; Hopper's have tests of their own."""
    with fake_gpu(monkeypatch, compute_capability=(8, 0)) as fake:
        yield fake


def forward_arrays(**changes):
    made = {name: FakeArray(shape) for name, shape in zip("qkv", (Q, K, K))}
    return list((made | changes).values())


def backward_arrays(**changes):
    shapes = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": LSE}
    made = {name: FakeArray(shape, "float32" if name == "lse" else "float16")
            for name, shape in shapes.items()}
    return made | changes


def test_forward_struct(monkeypatch):
    """Every field of the forward: a swapped pointer or stride is silent garbage."""
    q, k, v = forward_arrays(k=FakeArray(K, strides=(64 * 2000, 256, 128, 1)))
    with fake_gpu(monkeypatch, compute_capability=(8, 0)) as gpu:
        out, lse = dashcupy.attention(q, k, v, causal=True, scale=0.5, return_lse=True)
        launch, = gpu.launches
    assert launch.kernel == "fwd_sm80" and launch.stream == STREAM and not launch.cooperative
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (Q, "float16", LSE, "float32")
    assert launch.fields == {
        "q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr, "out": out.data.ptr,
        "lse": lse.data.ptr,
        "q_strides.batch": 300 * 8 * 64, "q_strides.row": 8 * 64, "q_strides.head": 64,
        "k_strides.batch": 64 * 2000, "k_strides.row": 256, "k_strides.head": 128,
        "v_strides.batch": 500 * 2 * 64, "v_strides.row": 2 * 64, "v_strides.head": 64,
        "out_strides.batch": 300 * 8 * 64, "out_strides.row": 8 * 64, "out_strides.head": 64,
        "lse_batch": 8 * 300, "lse_head": 300, "batch": 2, "n_q_head": 8, "n_kv_head": 2,
        "q_len": 300, "kv_len": 500, "mask_offset": 200,
        "scale_log2": np.float32(0.5 * np.log2(np.e)), "reserved": 0}


def test_backward_struct(gpu):
    """Both kernels of the backward get one struct, with every part of the workspace in place."""
    x = backward_arrays()
    dq, dk, dv = dashcupy.attention_backward(**x)
    before, main = gpu.launches
    assert (before.kernel, main.kernel) == ("bwd_preprocess", "bwd_sm80")
    assert before.fields == main.fields and {before.stream, main.stream} == {STREAM}
    plan = dashcupy.attention_plan(x["q"], x["k"], x["v"])
    workspace = gpu.allocated[-1]
    assert workspace.shape == (plan.workspace_bytes,)
    pointers = {name: array.data.ptr for name, array in {**x, "dq": dq, "dk": dk, "dv": dv}.items()}
    pointers |= {region.name: workspace.data.ptr + region.offset for region in plan.workspace}
    assert pointers | {"report": 0, "dlse": 0} == {
        name: main.fields[name] for name in (*pointers, "report", "dlse")}
    assert main.fields["scale"] == 0.125
    assert main.fields["scale_log2"] == np.float32(0.125 * np.log2(np.e))
    assert main.fields["dk_strides.batch"] == 500 * 2 * 64 and main.fields["dq_strides.row"] == 512
    assert main.fields["mask_offset"] == 0 and gpu.cleared == []
    assert main.fields["head_group"] == 4  # 2 kv heads of 2 sequences: few enough for one group


@pytest.mark.parametrize("n_sm, per_sm, max_ctas, grid", [
    (132, 1, None, 16), (5, 2, None, 10), (132, 1, 3, 3), (132, 1, 100, 16)])
def test_grid_of_the_backward(monkeypatch, n_sm, per_sm, max_ctas, grid):
    """More CTAs than fit would wait for a place that only they can free."""
    with fake_gpu(monkeypatch, n_sm=n_sm, per_sm=per_sm) as gpu:
        x = backward_arrays()
        names = call.INPUTS["backward"]
        call.run("backward", tuple(map(x.get, names)), (None,) * 3, max_ctas=max_ctas)
        assert gpu.launches[1].grid == grid  # 4 kv tiles of 4 heads


def test_a_team_that_does_not_fit_is_refused(monkeypatch):
    """It would hang; the launch-ordered schedules run with a single CTA."""
    with fake_gpu(monkeypatch, n_sm=3, compute_capability=(8, 0)) as gpu:
        with pytest.raises(UnsupportedError, match="needs 4 CTAs resident together.*only 3"):
            dashcupy.attention_backward(**backward_arrays(), schedule="shift")
        assert not gpu.launches
        dashcupy.attention_backward(**backward_arrays(), schedule="ascending")
        assert gpu.launches[1].grid == 3
    with fake_gpu(monkeypatch, n_sm=4, compute_capability=(8, 0)) as gpu:
        dashcupy.attention_backward(**backward_arrays(), schedule="shift")
        assert [launch.cooperative for launch in gpu.launches] == [False, True]


@pytest.mark.parametrize("changes, aligned", [
    ({}, True),
    ({"q": FakeArray(Q, pointer=(1 << 44) + 8)}, False),
    ({"k": FakeArray(K, strides=(500 * 132, 132, 66, 1))}, False),
    ({"dout": FakeArray(Q, strides=(0, 0, 0, 1))}, True),
    ({"v": FakeArray(K, strides=(64000, -128, 64, 1))}, True),
    ({"lse": FakeArray(LSE, "float32", strides=(2501, 307, 1), pointer=(1 << 45) + 4)}, True),
])
def test_alignment(gpu, monkeypatch, changes, aligned):
    """16-byte accesses to an address that is no multiple of 16 end the context."""
    seen = []
    monkeypatch.setattr(call, "Launcher", lambda plan, layouts, device, max_ctas:
                        seen.append(plan.aligned) or _Nothing(plan))
    dashcupy.attention_backward(**backward_arrays(**changes))
    assert seen == [aligned]


class _Nothing:
    def __init__(self, plan):
        self.plan = plan

    def __call__(self, *arguments):
        pass


def test_strides_of_short_axes_say_nothing():
    """Frameworks give an axis of one element any stride; it must not spoil the alignment."""
    layout = arrays.Layout((1, 300, 1, 64), (7, 64, 3, 1), "float16")
    assert used_strides(layout) == (0, 64, 0, 1)


def test_given_results_are_written_with_their_own_strides(gpu):
    """Gradients as slices of one fused array, as a fused projection has them."""
    shape = (2, 500, 2, 64)
    fused = FakeArray((2, 500, 6, 64))
    slices = [FakeArray(shape, strides=(500 * 6 * 64, 6 * 64, 64, 1),
                        pointer=fused.data.ptr + 2 * 64 * 2 * i) for i in range(3)]
    x = {name: FakeArray(shape) for name in ("dout", "q", "k", "v", "out")}
    x["lse"] = FakeArray((2, 2, 500), "float32")
    results = dashcupy.attention_backward(**x, grads=tuple(slices))
    assert all(result is given for result, given in zip(results, slices))
    fields = gpu.launches[-1].fields
    assert [fields[name] for name in ("dq", "dk", "dv")] == [s.data.ptr for s in slices]
    assert fields["dv_strides.row"] == 6 * 64


def test_results_that_share_gpu_memory_are_refused(gpu):
    """Addresses are compared without reading them; ends that touch are apart."""
    x = backward_arrays()
    n_bytes = 2 * 300 * 8 * 64 * 2
    for shift, name in ((0, "q"), (2, "q"), (2 - n_bytes, "q"), (0, "dout")):
        dq = FakeArray(Q, pointer=x[name].data.ptr + shift)
        with pytest.raises(InvalidInputError, match=f"dq shares memory with {name}"):
            dashcupy.attention_backward(**x, grads=(dq, None, None))
    assert not gpu.launches
    dashcupy.attention_backward(**x, grads=(
        FakeArray(Q, pointer=x["q"].data.ptr + n_bytes), None,
        FakeArray(K, pointer=x["v"].data.ptr - 2 * 500 * 2 * 64 * 2)))
    with pytest.raises(InvalidInputError, match="dk has shape .* several of its elements lie at"):
        dashcupy.attention_backward(**x, grads=(None, FakeArray(K, strides=(0, 128, 64, 1)), None))


def test_arrays_on_another_gpu(gpu):
    """Kernels run where the arrays are; the current device is as before, also after an error."""
    q, k, v = (FakeArray(shape, device=1) for shape in (Q, K, K))
    out = dashcupy.attention(q, k, v)
    launch, = gpu.launches
    assert launch.device == 1 and launch.stream == STREAM + 1 and out.data.device_id == 1
    assert gpu.current == 0
    gpu.codes = [719]
    with pytest.raises(DeviceError):
        dashcupy.attention(q, k, v)
    assert gpu.current == 0


def test_launch_errors_name_the_launch(gpu):
    """The driver says a number; one needs kernel, grid and sizes to act."""
    gpu.codes = [701]
    with pytest.raises(DeviceError, match=r"fwd_sm80 failed with error 701.*grid 48, \d+ threads, "
                                          r"\d+ bytes of dynamic shared memory, on Fake GPU 0"):
        dashcupy.attention(*forward_arrays())


def test_a_thread_without_a_context_gets_one(gpu):
    """cuLaunchKernelEx needs a current context, which a new thread of the caller does not have."""
    gpu.codes = [201]
    dashcupy.attention(*forward_arrays())
    assert len(gpu.launches) == 1


def test_new_lengths_in_a_thread_without_a_context(gpu):
    """Loaded kernels need no context to be found, but the driver does to count resident CTAs."""
    gpu.stack.clear()
    dashcupy.attention_backward(**backward_arrays())
    assert len(gpu.launches) == 2 and gpu.stack == [0]


@pytest.mark.parametrize("own", [[], [0]], ids=["no context", "context of GPU 0"])
@pytest.mark.parametrize("kind", [FakeArray, Foreign], ids=["cupy", "dlpack"])
def test_a_gpu_that_nobody_uses_gets_no_context(gpu, own, kind):
    """To switch back by setDevice would take some 500 MB of GPU 0 in each process of a job."""
    gpu.contexts.clear()
    gpu.stack[:] = own
    x = [kind(shape, device=1) for shape in (Q, K, K)]
    for _ in range(2):
        dashcupy.attention(*x, causal=True)
    dashcupy.attention_backward(**{name: kind(array.shape, array.dtype.name, device=1)
                                   for name, array in backward_arrays().items()})
    gpu.codes = [719]
    with pytest.raises(DeviceError):
        dashcupy.attention(*x)
    assert {launch.device for launch in gpu.launches} == {1}
    assert {array.data.device_id for array in gpu.allocated} == {1}
    assert gpu.contexts == {1}
    if own or kind is FakeArray:  # CuPy gives a thread that has none a context of its own accord
        assert gpu.stack == own and gpu.current == 0


def test_another_thread_may_record_a_graph(gpu):
    """CUDA's "global" mode forbids every thread to allocate, and a call that does so all the same
    spoils the recording: ours may be the first of its kind."""
    dashcupy.attention(*forward_arrays(), causal=True)
    for _ in range(2):  # the second asks whether the first is done
        dashcupy.attention(*(Foreign(shape) for shape in (Q, K, K)))
    assert gpu.unsafe == [] and gpu.capture_mode == GLOBAL


def test_a_recording_that_is_spoiled_is_an_error_of_ours(gpu):
    """CuPy's own error there names neither graph nor what to do."""
    def invalidated(stream):
        raise RuntimeError("an error has invalidated the capture sequence")
    gpu.cupy.cuda.runtime.streamIsCapturing = invalidated
    with pytest.raises(DeviceError, match="cannot be used: .* invalidated .*recording of a CUDA"):
        dashcupy.attention(*forward_arrays(), causal=True)


def test_a_forked_process_is_told_so(gpu):
    """CUDA says "initialization error" there, and nothing else."""
    def forked():
        raise RuntimeError("cudaErrorInitializationError: initialization error")
    dashcupy.attention(*forward_arrays())
    gpu.cupy.cuda.runtime.getDevice = forked
    with pytest.raises(DeviceError, match="initialization error; .* forked .* by spawn"):
        dashcupy.attention(*forward_arrays())


def test_the_counter_is_cleared_when_nobody_else_does(gpu):
    """Without a row of q there is no preprocess; a counter of garbage would skip the zeros."""
    empty = {name: FakeArray((2, 0, 8, 64)) for name in ("dout", "q", "out")}
    dashcupy.attention_backward(**backward_arrays(**empty, lse=FakeArray((2, 8, 0), "float32")))
    launch, = gpu.launches
    assert launch.kernel == "bwd_sm80" and gpu.cleared == [(launch.fields["work_counter"], 4)]


def test_nothing_is_launched_for_an_empty_batch(gpu):
    """A grid of 0 is an error of the driver."""
    out = dashcupy.attention(*(FakeArray((0, *shape[1:])) for shape in (Q, K, K)))
    assert out.shape == (0, 300, 8, 64) and not gpu.launches


def test_workspace_of_the_caller(gpu):
    """A CUDA graph replays into memory that the caller keeps."""
    x = backward_arrays()
    n_bytes = dashcupy.attention_plan(x["q"], x["k"], x["v"]).workspace_bytes
    workspace = FakeArray((n_bytes + 5,), "uint8")
    dashcupy.attention_backward(**x, workspace=workspace)
    assert gpu.launches[-1].fields["lse_log2"] == workspace.data.ptr
    assert all(array.dtype != "uint8" for array in gpu.allocated)
    for wrong in (FakeArray((n_bytes - 1,), "uint8"), FakeArray((n_bytes,), "float16"),
                  FakeArray((1, n_bytes), "uint8"),
                  FakeArray((n_bytes,), "uint8", pointer=(1 << 46) + 8),
                  FakeArray((n_bytes,), "uint8", strides=(2,))):
        with pytest.raises(InvalidInputError, match=f"at least {n_bytes} uint8"):
            dashcupy.attention_backward(**x, workspace=wrong)


def test_capture_needs_memory_that_is_kept(gpu):
    """CuPy's pool hands out what a captured call has freed: replays would write into it."""
    gpu.capturing = True
    q, k, v = forward_arrays()
    with pytest.raises(UnsupportedError, match="return_lse=True"):
        dashcupy.attention(q, k, v)
    dashcupy.attention(q, k, v, return_lse=True)
    x = backward_arrays()
    with pytest.raises(UnsupportedError, match="workspace="):
        dashcupy.attention_backward(**x)
    n_bytes = dashcupy.attention_plan(x["q"], x["k"], x["v"]).workspace_bytes
    dashcupy.attention_backward(**x, workspace=FakeArray((n_bytes,), "uint8"))


def test_debug_builds_report_who_was_stuck(gpu, monkeypatch):
    """A hang without a name cannot be debugged; the setting is read at every call."""
    dashcupy.attention_backward(**backward_arrays())
    monkeypatch.setenv("DASHCUPY_DEBUG", "1")
    dashcupy.attention_backward(**backward_arrays())
    assert gpu.cleared == [(gpu.launches[-1].fields["report"], 32)]
    gpu.report[:6] = 1, 13 * 3 + 2, 2, 2, 3, 1
    with pytest.raises(HangError, match=r"kv tile 2 .* q tile 2 \(batch 1, q head 5\).*ticket 3 "
                                        r"and saw 1"):
        dashcupy.attention_backward(**backward_arrays())


def test_debug_builds_are_not_captured(gpu, monkeypatch):
    """Waiting for the GPU would break the capture with an error of the driver, after launches."""
    install_torch(monkeypatch)
    monkeypatch.setenv("DASHCUPY_DEBUG", "1")
    gpu.capturing = True
    x = {name: FakeTensor(Q) for name in ("dout", "q", "out")}
    x |= {"k": FakeTensor(K), "v": FakeTensor(K), "lse": FakeTensor(LSE, "float32")}
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="DASHCUPY_DEBUG=0 for the capture"):
            dashcupy.attention_backward(**x)
    assert not gpu.launches
    dashcupy.attention(x["q"], x["k"], x["v"])  # the forward only bounds its waits
    monkeypatch.setenv("DASHCUPY_DEBUG", "0")
    dashcupy.attention_backward(**x)


def test_a_quiet_report_raises_nothing():
    """Garbage behind a first word of 0 is no report."""
    from dashcupy.problem import Problem
    plan = make_plan(Problem(1, 64, 64, 1, 1, 64, "float16", "full", 1.0), "backward", (9, 0))
    check_report(plan, np.array([0, 1, 2, 3, 4, 5, 6, 7], np.uint32))


@pytest.mark.parametrize("changes, message", [
    ({"v": FakeArray(K, strides=(64000, 128, 1, 2))}, r"v has strides .*last axis must be contig"),
    ({"dout": FakeArray(Q, strides=(0, 0, 0, 0))}, "dout has strides .*last axis must be contig"),
    ({"q": FakeArray(Q, pointer=(1 << 44) + 1)}, "no multiple of its element's size"),
    ({"lse": FakeArray(LSE, "float32", pointer=(1 << 44) + 2)}, "no multiple of its element's"),
    ({"lse": FakeArray(LSE, "float32", strides=(1, 600, 2))}, "lse has strides"),
    ({"k": FakeArray(K, device=1)}, "q is on GPU 0 and k on GPU 1"),
    ({"k": np.zeros(K, np.float16)}, "q is a .*FakeArray and k a numpy.ndarray"),
    ({"lse": FakeArray(LSE, "float16")}, "lse has dtype float16, expected float32"),
])
def test_what_a_kernel_could_not_read_is_refused(gpu, changes, message):
    """Each would be read as something else, or stop the context."""
    with pytest.raises(InvalidInputError, match=message):
        dashcupy.attention_backward(**backward_arrays(**changes))
    assert not gpu.launches


@pytest.mark.parametrize("schedule", ["shfit", "symmetric_shift"])
def test_refusals_reach_the_caller_each_time(gpu, schedule):
    """An error must not be remembered as a result."""
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=schedule):
            dashcupy.attention_backward(**backward_arrays(), schedule=schedule)


def test_plan_of_gpu_arrays(gpu):
    """The plan tells what would run, and touches nothing."""
    q, k, v = forward_arrays()
    plan = dashcupy.attention_plan(q, k, v, schedule="ascending")
    assert plan.target == (8, 0) and plan.schedule == "ascending" and plan.aligned
    assert not gpu.launches and not gpu.allocated
    with pytest.raises(InvalidInputError, match="last axis"):
        dashcupy.attention_plan(q, k, FakeArray(K, strides=(64000, 128, 1, 2)))
