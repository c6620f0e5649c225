"""Threads that share launchers, maps, counters and what is known of calls, on a recording GPU."""

import itertools
import threading

import pytest
from fake_gpu import FUNCTIONS, FakeArray, fake_gpu

import dashcupy

# Lengths, heads, head_dim, mask and schedule: both kernel families, teams and none.
MIXED = [
    (300, 500, 8, 2, 64, True, "descending"), (700, 700, 2, 2, 64, True, "symmetric_shift"),
    (300, 600, 4, 4, 128, False, "shift"), (64, 64, 3, 1, 128, True, "auto"),
    (1, 1, 1, 1, 96, False, "ascending"),
]
N_THREAD, N_ROUND = 8, 20


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        yield fake


def one_call(number):
    """Addresses and sizes of one forward and one backward, as the kernels must be told them."""
    q_len, kv_len, n_q_head, n_kv_head, head_dim, causal, schedule = MIXED[number % len(MIXED)]
    q, dout = (FakeArray((1, q_len, n_q_head, head_dim), "bfloat16") for _ in range(2))
    k, v = (FakeArray((1, kv_len, n_kv_head, head_dim), "bfloat16") for _ in range(2))
    out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=causal, schedule=schedule)
    sizes = {"q_len": q_len, "kv_len": kv_len, "n_q_head": n_q_head, "n_kv_head": n_kv_head}
    pointers = {name: x.data.ptr for name, x in zip(
        ("out", "lse", "dout", "q", "k", "v", "dq", "dk", "dv"), (out, lse, dout, q, k, v, *grads))}
    return pointers, sizes


def expect_launched(gpu, calls):
    """That each call of `one_call` was launched with its own addresses, maps and sizes."""
    forwards = {launch.fields["lse"]: launch for launch in gpu.launches
                if launch.kernel == "fwd_sm90"}
    backwards = {launch.fields["dq"]: launch for launch in gpu.launches
                 if launch.kernel.startswith("bwd_sm")}
    assert len(forwards) == len(backwards) == len(calls)
    for pointers, sizes in calls:
        forward, backward = forwards[pointers["lse"]].fields, backwards[pointers["dq"]].fields
        maps = {name: forward[f"{name}_map"].pointer for name in ("q", "k", "v", "out")}
        assert maps == {name: pointers[name] for name in maps}
        for name, pointer in pointers.items():
            assert backward[name] == pointer
            if f"{name}_map" in backward:
                assert backward[f"{name}_map"].pointer == pointer
        for name, size in sizes.items():
            assert forward[name] == backward[name] == size


@pytest.mark.parametrize("warm", [False, True], ids=["first calls", "known calls"])
def test_threads_do_not_mix_their_calls(gpu, warm):
    """An address, a map or a grid of another thread's call is silent garbage."""
    if warm:
        for number in range(len(MIXED)):
            one_call(number)
        gpu.launches.clear()
    barrier, calls = threading.Barrier(N_THREAD), []

    def work(thread):
        barrier.wait()
        calls.extend([one_call(thread + i) for i in range(N_ROUND)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(N_THREAD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == N_THREAD * N_ROUND
    expect_launched(gpu, calls)
    counters = [launch.fields["work_counter"] for launch in gpu.launches
                if launch.kernel == "fwd_sm90"]
    counters = [counter for counter in counters if counter]
    assert len(set(counters)) == len(counters) > 0
    spaces = sorted((array.data.ptr, array.data.ptr + array.shape[0]) for array in gpu.allocated
                    if array.dtype == "uint8")
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spaces))


def test_a_call_inside_a_call(gpu):
    """A finalizer may run between any two steps of a call, and make one of the same kind."""
    one_call(0)
    gpu.launches.clear()
    launch, calls, pending = gpu._launch, [], ["fwd_sm90", "bwd_preprocess"]

    def interrupted(attributes, function, *arguments):
        if pending and function == FUNCTIONS[pending[0]]:
            pending.pop(0)
            calls.append(one_call(0))
        return launch(attributes, function, *arguments)

    gpu._launch = interrupted
    calls.append(one_call(0))
    assert len(calls) == 3
    expect_launched(gpu, calls)
