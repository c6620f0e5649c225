"""The parameter structs of the kernels: the same fields, in the same order, as ``params.cuh``."""

from __future__ import annotations

import functools
import struct

# Codes of the `struct` module: P pointer, q 64-bit int, i int, f float. Pointers come first, so
# that a launch fills in one run of them and keeps the rest.
_STRIDES = tuple((axis, "q") for axis in ("batch", "row", "head"))


def _strides(*arrays: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{array}_strides.{axis}", code) for array in arrays for axis, code in _STRIDES)


def _fields(code: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, code) for name in names)


# What `attention` and `attention_backward` hand over, in the order of the struct.
ARRAYS = {
    "forward": ("q", "k", "v", "out", "lse"),
    "backward": ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"),
}
# Parts of the workspace, in the order of the struct.
WORKSPACE = {
    "forward": (),
    "backward": ("lse_log2", "delta", "dq_accum", "dq_semaphore", "work_counter", "report"),
}
_SIZES = ("batch", "n_q_head", "n_kv_head", "q_len", "kv_len", "mask_offset")

FIELDS = {
    "forward": (
        *_fields("P", *ARRAYS["forward"]),
        *_strides("q", "k", "v", "out"),
        *_fields("q", "lse_batch", "lse_head"),
        *_fields("i", *_SIZES),
        *_fields("f", "scale_log2"),
        *_fields("i", "reserved"),
    ),
    "backward": (
        *_fields("P", *ARRAYS["backward"], *WORKSPACE["backward"]),
        *_strides("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
        *_fields("q", "lse_batch", "lse_head"),
        *_fields("i", *_SIZES),
        *_fields("f", "scale", "scale_log2"),
        *_fields("i", "head_group", "reserved"),
    ),
}


@functools.cache
def _struct(direction: str) -> struct.Struct:
    # "P" needs native mode; native sizes and alignment are also what the compiler uses.
    return struct.Struct("@" + "".join(code for _, code in FIELDS[direction]))


def n_bytes(direction: str) -> int:
    """Size of the struct; the kernels assert that theirs is the same (``DC_PARAMS_BYTES``)."""
    return _struct(direction).size


def offsets(direction: str) -> dict[str, int]:
    """Offset in bytes of every field."""
    result, before = {}, "@"
    for name, code in FIELDS[direction]:
        result[name] = struct.calcsize(before + "0" + code)
        before += code
    return result


def pack(direction: str, values: dict[str, int | float]) -> bytes:
    """The struct with these values; pointers that are not named are null.

    Raises
    ------
    KeyError
        A field that is no pointer is missing.
    """
    return _struct(direction).pack(*(
        values.get(name, 0) if code == "P" else values[name] for name, code in FIELDS[direction]))


@functools.cache
def pointer_packer(direction: str) -> struct.Struct:
    """Packs the pointers alone, which stand at the start of the struct."""
    return struct.Struct("@" + "".join(code for _, code in FIELDS[direction] if code == "P"))
