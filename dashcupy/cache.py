"""Compiled kernels on disk: one file each, named by what it was made from and by its content."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

from . import env
from .errors import DashcupyError

FORMAT = 1  # raise it when the meaning of a name or of a file changes
_CHECKSUM_DIGITS = 32

_lock = threading.Lock()
_private: Path | None = None


def name_of(kernel: str, arch: str, *made_from) -> str:
    """Name of a cache entry: kernel, architecture and a hash of all that it is made from."""
    made_from = repr((FORMAT, kernel, arch, *made_from)).encode()
    return f"{kernel}-{arch}-{hashlib.sha256(made_from).hexdigest()[:32]}"


def fetch(name: str, make: Callable[[], bytes]) -> Path:
    """Path of a cubin, made and stored first if there is no sound copy of it.

    The checksum in a file's name is compared with its content, so a damaged or half-written
    file is made again. A file appears under its name at once and whole: other threads and
    processes see all of it or nothing. A folder that cannot be written never stops the caller:
    then the file goes to a folder of this process, removed at its end.
    """
    folder = folder_or_none()
    for place in (folder, _private):
        if place and (path := _find(place, name)):
            return path
    cubin = make()
    return _write(f"{name}-{_checksum(cubin)}.cubin", cubin, folder)


def keep_source(name: str, source: str) -> Path:
    """Store the expanded source of an entry beside its cubin."""
    return _write(f"{name}.cu", source.encode(), folder_or_none())


def folder_or_none() -> Path | None:
    """The cache folder; None if there is no home folder to put it in."""
    try:
        return env.cache_dir()
    except RuntimeError:  # pathlib, for a user without a home
        return None


def _find(folder: Path, name: str) -> Path | None:
    try:
        for path in folder.glob(f"{name}-*.cubin"):
            if path.stem[len(name) + 1:] == _checksum(path.read_bytes()):
                return path
    except OSError:  # a folder or file that cannot be read is a miss
        pass
    return None


def _write(file_name: str, content: bytes, folder: Path | None) -> Path:
    global _private
    reason = "there is no home folder"
    if folder:
        try:
            return _write_at_once(folder / file_name, content)
        except OSError as error:
            reason = str(error)
    with _lock:
        try:
            if _private is None:
                _private = Path(tempfile.mkdtemp(prefix="dashcupy-"))
                atexit.register(_remove_private, _private, os.getpid())
                warnings.warn(f"the cache of compiled kernels cannot be written ({reason}): this "
                              f"process keeps them in {_private}, and the next one compiles "
                              f"again; set DASHCUPY_CACHE_DIR to a writable folder",
                              RuntimeWarning, stacklevel=4)
            return _write_at_once(_private / file_name, content)
        except OSError as error:
            raise DashcupyError(f"a compiled kernel can be stored neither in {folder} ({reason}) "
                                f"nor in a temporary folder ({error}); set DASHCUPY_CACHE_DIR or "
                                f"TMPDIR to a writable folder with some MB free") from error


def _write_at_once(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_CHECKSUM_DIGITS]


def _remove_private(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's files
        shutil.rmtree(folder, ignore_errors=True)
