"""The results file: a JSON list of flat records, one line each, merged by what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from dashcupy.errors import InvalidInputError

RESULTS = Path(__file__).resolve().parent / "results" / "h200.json"

# What a record measures: two records that agree on these are the same measurement made twice.
KEY = ("direction", "head_dim", "causal", "dtype", "batch", "seqlen", "kv_len", "q_heads",
       "kv_heads", "peer", "schedule", "mode", "device")
# What it found, and with what.
VALUES = ("schedule_used", "ms", "ms_spread", "tflops", "same_bits", "host_us", "kernel",
          "source_digest", "driver", "cuda", "versions", "date")


def key_of(record: Mapping) -> tuple:
    """Identity of a record; missing fields raise KeyError."""
    return tuple(record[name] for name in KEY)


def read(path: Path = RESULTS) -> list[dict]:
    """Records of a file; none if it does not exist.

    Raises
    ------
    InvalidInputError
        The file holds something else.
    """
    found = load(path) if path.is_file() else []
    if not isinstance(found, list) or not all(
            isinstance(record, dict) and set(KEY) <= set(record) for record in found):
        raise InvalidInputError(f"{path} is no list of records; give another file")
    return found


def load(path: Path) -> object:
    """What a file of JSON holds.

    Raises
    ------
    InvalidInputError
        It cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is no file of JSON ({error}); give another file, or make "
                                f"it again") from error


def merge(old: Iterable[Mapping], new: Iterable[Mapping]) -> list[dict]:
    """Union of two lists in a fixed order; where both measured the same, ``new`` wins."""
    found = {key_of(record): dict(record) for record in old}
    found |= {key_of(record): dict(record) for record in new}
    return [found[key] for key in sorted(found, key=_sortable)]


def write(path: Path, new: Iterable[Mapping]) -> int:
    """Merge records into a file, in one step.

    Returns
    -------
    int
        Records in the file now.
    """
    merged = merge(read(path), new)
    lines = ",\n".join(json.dumps({name: record[name] for name in (*KEY, *VALUES)})
                       for record in merged)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")
    os.replace(scratch, path)
    return len(merged)


def cell_of(record: Mapping) -> tuple:
    """The problem that was timed: head_dim, mask (causal first), length, batch and heads."""
    return (record["head_dim"], not record["causal"], record["seqlen"], record["kv_len"],
            record["batch"], record["q_heads"], record["kv_heads"])


def by_schedule(found: Iterable[Mapping]) -> dict[tuple[tuple, str], Mapping]:
    """Backward records of ours by cell and schedule.

    A time of ``auto`` stands in for the schedule that it came to where that was not timed itself.
    """
    mine = {}
    for record in sorted(found, key=lambda r: r["schedule"] != "auto"):
        if (record["peer"], record["direction"]) == ("dashcupy", "backward"):
            mine[cell_of(record), record["schedule_used"]] = record
    return mine


def device_of(found: Iterable[Mapping]) -> str:
    """The one card of these records.

    Raises
    ------
    InvalidInputError
        There are several: each has a results file of its own.
    """
    devices = sorted({record["device"] for record in found})
    if len(devices) != 1:
        raise InvalidInputError(f"records of {', '.join(devices) or 'no card'}: give a results "
                                f"file of one card")
    return devices[0]


def _sortable(key: tuple) -> tuple:
    # None, booleans, numbers and text do not compare with one another.
    return tuple((isinstance(part, str), part is not None, part if part is not None else 0)
                 for part in key)
