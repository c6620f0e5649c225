"""The parameter structs of the kernels: the same fields, in the same order, as ``params*.cuh``."""

from __future__ import annotations

import functools
import struct

# Codes of the `struct` module: P pointer, q 64-bit int, i int, f float, 128s tensor map. Pointers
# (after tensor maps) come first, so that a launch fills in one run of them and keeps the rest.
_MAP = "128s"
_MAP_ALIGNMENT = 64
_STRIDES = tuple((axis, "q") for axis in ("batch", "row", "head"))


def _strides(*arrays: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{array}_strides.{axis}", code) for array in arrays for axis, code in _STRIDES)


def _fields(code: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, code) for name in names)


# What `attention` and `attention_backward` hand over, in the order of the struct; the address of
# what is not given is 0.
ARRAYS = {
    "forward": ("q", "k", "v", "out", "lse"),
    "backward": ("q", "k", "v", "out", "dout", "lse", "dlse", "dq", "dk", "dv"),
}
# Parts of the workspace, in the order of the struct.
WORKSPACE = {
    "forward": ("q_copy", "k_copy", "v_copy", "out_copy"),
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
        *_fields("q", "lse_batch", "lse_head", "dlse_batch", "dlse_head"),
        *_fields("i", *_SIZES),
        *_fields("f", "scale", "scale_log2"),
        *_fields("i", "head_group", "reserved"),
    ),
    "forward_sm90": (
        *_fields(_MAP, "q_map", "k_map", "v_map", "out_map"),
        *_fields("P", "lse", "work_counter"),
        *_fields("q", "lse_batch", "lse_head"),
        *_fields("i", *_SIZES),
        *_fields("f", "scale_log2"),
        *_fields("i", "head_group"),
    ),
    "backward_maps": _fields(_MAP, "q", "dout", "k", "v", "dk", "dv"),
    "copy": (
        *_fields("P", "from", "to"),
        *_strides("from", "to"),
        *_fields("i", "batch", "len", "n_head", "reserved"),
    ),
}


@functools.cache
def _struct(kind: str) -> struct.Struct:
    # "P" needs native mode; native sizes and alignment are also what the compiler uses.
    codes = "".join(code for _, code in FIELDS[kind])
    size = struct.calcsize("@" + codes)
    padding = -size % (_MAP_ALIGNMENT if _MAP in codes else struct.calcsize("P"))
    return struct.Struct(f"@{codes}{padding}x")


def n_bytes(kind: str) -> int:
    """Size of the struct; the kernels assert that theirs is the same (``DC_PARAMS_BYTES``)."""
    return _struct(kind).size


def offsets(kind: str) -> dict[str, int]:
    """Offset in bytes of every field."""
    result, before = {}, "@"
    for name, code in FIELDS[kind]:
        result[name] = struct.calcsize(before + ("" if code == _MAP else "0" + code))
        before += code
    return result


def pack(kind: str, values: dict[str, int | float | bytes]) -> bytes:
    """The struct with these values; pointers and tensor maps that are not named are zeros.

    Raises
    ------
    KeyError
        Another field is missing.
    """
    absent = {"P": 0, _MAP: b""}
    return _struct(kind).pack(*(
        values.get(name, absent[code]) if code in absent else values[name]
        for name, code in FIELDS[kind]))


@functools.cache
def leading(kind: str) -> struct.Struct:
    """Packs the tensor maps and pointers alone, which come first."""
    return struct.Struct("@" + "".join(code for _, code in FIELDS[kind] if code in ("P", _MAP)))
