"""Several threads, streams, graphs and GPUs at a time, and what a first call does to the others."""

import ctypes
import gc
import threading

import dashcupy
import pytest
from dashcupy import call, counters, driver, env, ready

from .support import (
    DEVICE,
    PROCESS_LIMIT_S,
    Case,
    digest,
    expect_same_bits,
    in_new_process,
    limit,
    run,
    torch,
    two_gpus,
)

pytestmark = pytest.mark.gpu

# Kernels of both families, both masks, teams and none, copies of what no tensor map can describe.
MIXED = [
    Case(200, 333, "causal", batch=2, n_q_head=4, n_kv_head=2, schedule="descending"),
    Case(700, 700, "causal", batch=2, schedule="symmetric_shift"),
    Case(333, 600, "full", 128, schedule="shift"),
    Case(500, 500, "causal", 128, n_q_head=4, n_kv_head=1),
    Case(1, 1, "full", 128),
]


def mixed_digests(order: int) -> dict[int, str]:
    """Digests of MIXED on a stream of this thread's own, taken round from number ``order`` on."""
    found = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(len(MIXED)):
            i = (i + order) % len(MIXED)
            found[i] = digest(run(MIXED[i], MIXED[i].draw()))
    return found


def in_threads(work, n_thread: int = 8) -> list:
    """Results of ``work(0)``, ``work(1)``, ... called at the same time."""
    barrier, found = threading.Barrier(n_thread), {}

    def start(i):
        barrier.wait()
        found[i] = work(i)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(n_thread)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == n_thread, "a thread raised"
    return [found[i] for i in range(n_thread)]


def fresh_state() -> None:
    """Forget launchers, known calls and counters; kernels stay loaded."""
    call._launcher.cache_clear()
    counters.of_device.cache_clear()
    ready.forget()


@limit(PROCESS_LIMIT_S + 40)
def test_first_calls_of_eight_threads(tmp_path):
    # Two threads that compile, load, or make counters at the same time; a stream or a context that
    # belongs to the thread that came first. In a new process, on an empty cache.
    code = ("from gpu.test_threads import in_threads, mixed_digests\n"
            "for found in in_threads(mixed_digests):\n    print(sorted(found.items()))\n")
    lines = in_new_process(code, DASHCUPY_CACHE_DIR=str(tmp_path)).splitlines()
    here = in_threads(mixed_digests)  # compiles on many cores
    expected = mixed_digests(0)
    assert all(found == expected for found in here)
    assert lines == [str(sorted(expected.items()))] * 8


def test_eight_threads_that_go_on():
    # Launchers and tensor maps that threads share, and streams that run beside each other.
    expected = mixed_digests(0)
    for _ in range(3):
        fresh_state()
        for found in in_threads(lambda i: [mixed_digests(i + j) for j in range(6)]):
            assert all(one == expected for one in found)


_RECORDED = pytest.mark.skipif(
    env.debug(), reason="debug builds wait for the GPU, which no graph allows")


@_RECORDED
@pytest.mark.parametrize("head_dim", [64, 56], ids=["loaded", "new"])
def test_a_first_call_beside_a_recording(head_dim):
    # In torch's mode of recording, an allocation of any thread spoils it: counters, or a kernel
    # that is compiled and loaded only now.
    inputs = Case(300, 300, "causal").draw()
    run(Case(300, 300, "causal"), inputs)
    case = Case(1000, 1000, "causal", head_dim, n_q_head=8, n_kv_head=8)
    other = case.draw()
    out, lse = torch.empty_like(other["q"]), torch.empty(1, 8, 1000, device=DEVICE)
    fresh_state()
    torch.cuda.synchronize()
    found = []

    def first_call():
        with torch.cuda.stream(torch.cuda.Stream()):
            dashcupy.attention(*(other[name] for name in "qkv"), causal=True, return_lse=True,
                               out=(out, lse))
            found.append(True)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        doubled = inputs["q"] * 2
        thread = threading.Thread(target=first_call)
        thread.start()
        thread.join(30)
        doubled += 1
    graph.replay()
    torch.cuda.synchronize()
    assert found, "the thread raised"
    assert torch.equal(doubled, inputs["q"] * 2 + 1)
    again = dashcupy.attention(*(other[name] for name in "qkv"), causal=True, return_lse=True)
    expect_same_bits({"out": out, "lse": lse}, dict(zip(("out", "lse"), again)),
                     "beside a recording")


@_RECORDED
def test_a_recording_before_any_other_call():
    # Counters that are zeroed by what is recorded, or on a stream that is.
    case = Case(2000, 2000, "causal", 128, n_q_head=16, n_kv_head=16)
    inputs = case.draw()
    expected = run(case, inputs)
    fresh_state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, inputs)
    for i in range(3):
        for x in got.values():
            x.fill_(float("nan"))
        graph.replay()
        expect_same_bits(got, expected, f"replay {i}")


@_RECORDED
def test_two_instances_of_one_graph():
    # At the same time they disturb each other, which is documented; each replay after that must be
    # right again, not start from the counter that the two have left.
    cupy = pytest.importorskip("cupy")
    case = Case(3000, 3000, "causal", 128, n_q_head=16, n_kv_head=16)
    inputs = case.draw()
    expected = run(case, inputs)
    out, lse = (torch.empty_like(expected[name]) for name in ("out", "lse"))
    runtime, streams = cupy.cuda.runtime, [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        runtime.streamBeginCapture(streams[0].cuda_stream, runtime.streamCaptureModeRelaxed)
        dashcupy.attention(*(inputs[name] for name in "qkv"), causal=True, return_lse=True,
                           out=(out, lse))
        graph = runtime.streamEndCapture(streams[0].cuda_stream)
    instances = [runtime.graphInstantiate(graph) for _ in range(2)]
    for _ in range(20):
        for instance, stream in zip(instances, streams):
            runtime.graphLaunch(instance, stream.cuda_stream)
    torch.cuda.synchronize()
    for instance in instances * 2:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        torch.cuda.synchronize()
        runtime.graphLaunch(instance, streams[0].cuda_stream)
        torch.cuda.synchronize()
        expect_same_bits({"out": out, "lse": lse}, {name: expected[name] for name in
                                                    ("out", "lse")}, "an instance by itself")
        expect_same_bits(run(case, inputs), expected, "a call of its own")
    for instance in instances:
        runtime.graphExecDestroy(instance)
    runtime.graphDestroy(graph)


@limit(PROCESS_LIMIT_S + 20)
def test_out_of_memory():
    # In a process of its own: memory that others have left in torch's cache would be enough.
    in_new_process("from gpu.test_threads import run_out_of_memory\nrun_out_of_memory()\n")


def run_out_of_memory() -> None:
    """An error half-way that keeps the workspace, or spoils the next call, does not pass.

    torch's own error goes through: programs catch it by its type.
    """
    case = Case(4096, 4096, "causal", 128, batch=2, n_q_head=8, n_kv_head=8)
    inputs = case.draw()
    expected = run(case, inputs)
    keep = {name: expected[name] for name in ("out", "lse")}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    # Room for the results (48 MiB), and none for the workspace (34 MiB).
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + (70 << 20)) / total)
    try:
        for _ in range(3):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                dashcupy.attention_backward(
                    inputs["dout"], *(inputs[name] for name in "qkv"), *keep.values(), causal=True)
            gc.collect()  # frames of the traceback hold the results
            assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    expect_same_bits(run(case, inputs), expected, "after out of memory")


@limit(PROCESS_LIMIT_S + 20)
@two_gpus
def test_a_gpu_that_nobody_uses_gets_no_context():
    # 500 MB of GPU 0 in every process of a job that gives each process a GPU of its own.
    lines = in_new_process("from gpu.test_threads import use_gpu_1\nuse_gpu_1()\n").splitlines()
    assert lines == ["0", f"0 0 {digest(run(MIXED[0], MIXED[0].draw()))}"] + ["0 0 1"] * 2


def use_gpu_1() -> None:
    """Whether GPU 0 has a context: before, after calls, after calls of a thread, with CuPy."""
    with torch.cuda.device(1):
        inputs = MIXED[0].draw("cuda:1")  # the same numbers, without a use of GPU 0
    print(_has_context(0))
    got = run(MIXED[0], inputs)
    print(_has_context(0), torch.cuda.current_device(), digest(got))

    def again():
        got = run(MIXED[0], inputs)
        print(_has_context(0), torch.cuda.current_device(), got["dq"].get_device())

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    again()


def _has_context(device: int) -> int:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.library().cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    return active.value
