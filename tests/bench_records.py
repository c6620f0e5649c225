"""Records as a run would leave them, for the tests of the bench."""


def record(**changes):
    """A backward of ours, or what the changes make of it."""
    return {
        "direction": "backward", "head_dim": 128, "causal": True, "dtype": "bfloat16", "batch": 4,
        "seqlen": 4096, "kv_len": 4096, "q_heads": 16, "kv_heads": 16, "peer": "dashcupy",
        "schedule": "auto", "mode": "deterministic", "device": "NVIDIA H200",
        "schedule_used": "descending", "ms": 2.0, "ms_spread": 0.1, "tflops": 343.6,
        "same_bits": True, "host_us": 40.0, "kernel": None, "source_digest": "d", "driver": "580",
        "cuda": "13.0", "versions": {"torch": "2.11.0", "cudnn": "91900"},
        "date": "2026-01-01"} | changes


def of_peer(peer, **changes):
    """A record of another function in the same cell."""
    mode = "deterministic" if peer.endswith("_det") else "default"
    return record(peer=peer, schedule=None, schedule_used=None, mode=mode, **changes)


def of_schedule(schedule, **changes):
    """A record of ours with a schedule that was asked for by name."""
    mode = "default" if schedule == "unordered" else "deterministic"
    return record(**dict(schedule=schedule, schedule_used=schedule, mode=mode) | changes)
