"""The record of a check for machines: JSON that another machine can compare its own with."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from .. import info
from ..errors import InvalidInputError
from ..version import __version__
from .run import CaseResult, Settings
from .subject import Subject

FORMAT = 1  # goes up when the meaning of a key changes; part of every record


def make_record(subject: Subject, results: list[CaseResult], settings: Settings,
                seconds: float) -> dict:
    """All that is known, as JSON has it.

    Returns
    -------
    dict
        ``format``, ``dashcupy`` (version), ``subject``, ``ok``, ``device`` (kind, title, why,
        arithmetic), ``info`` (as `dashcupy.info.collect`), ``settings``, ``seconds`` and
        ``cases``: each with ``case``, ``inputs_digest`` and ``runs``, each of which with ``name``,
        ``fingerprint``, ``tests`` and ``tensors``, each of which with ``digest`` (SHA-256),
        ``report`` (errors and bounds), ``yardstick_error`` and ``differences``.
    """
    place = subject.place
    return {
        "format": FORMAT,
        "dashcupy": __version__,
        "subject": subject.title,
        "ok": all(result.ok for result in results),
        "device": {"kind": place.kind, "title": place.title, "why": place.why,
                   "arithmetic": place.arithmetic},
        "info": info.collect(),
        "settings": asdict(settings),
        "seconds": seconds,
        "cases": [_case_record(result) for result in results],
    }


def write_record(file: str, record: dict) -> None:
    """Write a record to a file, or with ``-`` to stdout.

    Raises
    ------
    InvalidInputError
        The file cannot be written.
    """
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise _unwritable(file, error) from error


def require_writable(file: str) -> None:
    """Refuse a file that cannot be written, before the work and not after it.

    Raises
    ------
    InvalidInputError
        With the system's reason.
    """
    if file != "-":
        path = Path(file)
        try:
            new = not path.exists()
            with path.open("a"):
                pass
            if new:  # a check that is interrupted leaves nothing behind
                path.unlink()
        except OSError as error:
            raise _unwritable(file, error) from error


def read_record(file: str) -> dict:
    """A record of this or another machine.

    Raises
    ------
    InvalidInputError
        No such file, or it is no record of this format.
    """
    try:
        record = json.loads(Path(file).read_text())
    except OSError as error:
        raise InvalidInputError(f"--expect {file}: cannot be read ({error.strerror}); give a file "
                                f"that `check --json FILE` wrote") from error
    except ValueError as error:
        raise InvalidInputError(f"--expect {file}: not JSON ({error}); give a file that "
                                f"`check --json FILE` wrote") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise InvalidInputError(
            f"--expect {file}: a record of format {found}, this dashcupy reads format {FORMAT}; "
            f"write it again with `check --json` of the same version")
    return record


def _unwritable(file: str, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"--json {file}: cannot be written ({error.strerror}); give a file "
                             f"in a folder that exists, or - for stdout")


def _case_record(result: CaseResult) -> dict:
    record = _finite(asdict(result))
    record["ok"] = result.ok
    for run, run_record in zip(result.runs, record["runs"]):
        run_record["ok"] = run.ok
        for tensor, tensor_record in zip(run.tensors, run_record["tensors"]):
            tensor_record["ok"] = tensor.ok
    return record


def _finite(value):
    """``value`` with NaN and infinities as strings: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
