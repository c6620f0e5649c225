"""What a run leaves behind: digests of tensors, machine and versions, a JSON file."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from dashcupy.errors import InvalidInputError
from dashcupy.source import source_digest

from .. import timing
from .parallel import whole

FORMAT = "dashcupy training record 1"


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor, by name; shards are put together first."""
    names, copies = zip(*((name, whole(x).detach().cpu()) for name, x in tensors))
    with ThreadPoolExecutor() as pool:  # hashlib lets go of the interpreter lock
        return dict(zip(names, pool.map(_digest, copies)))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def machine(device: torch.device) -> dict:
    """Device, driver, versions and the digest of the package's code."""
    if device.type == "cuda":
        found = timing.environment()
    else:
        found = {"device": f"{platform.machine()} CPU", "versions": timing.versions(),
                 "date": datetime.date.today().isoformat()}
    return found | {"source_digest": source_digest()}


def write(path: Path, record: Mapping) -> None:
    """Write a record as JSON, in one step."""
    write_json(path, {"format": FORMAT} | dict(record))


def write_json(path: Path, content: Mapping) -> None:
    """Write JSON for a person to read, in one step."""
    text = json.dumps(content, indent=1) + "\n"
    write_at_once(path, lambda file: file.write(text.encode()))


def read(path: Path) -> dict:
    """Read a record.

    Raises
    ------
    InvalidInputError
        There is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read as a record: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InvalidInputError(f"{path} is no record of a training run; give a file that "
                                f"bench.train_repro --json wrote")
    return found


def require_writable(path: Path) -> None:
    """Refuse, before the work, a file that `write_at_once` could not write after it.

    Raises
    ------
    InvalidInputError
        With the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write_at_once(path: Path, write_to: Callable[[BinaryIO], object]) -> None:
    """Let a function fill a file that appears under its name whole, or not at all.

    Raises
    ------
    InvalidInputError
        The folder cannot be written.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(scratch, "wb") as file:
            write_to(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        scratch.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"{path} cannot be written: {error.strerror}")
