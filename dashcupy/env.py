"""Every environment variable that dashcupy reads; each is read at call time, never at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# name -> (default, effect): the one table that `python -m dashcupy info` prints.
VARIABLES = {
    "DASHCUPY_CACHE_DIR": ("the user cache folder", "where compiled kernels are kept"),
    "DASHCUPY_DEBUG": ("0", "1: bound every wait; the backward also reports who was stuck"),
    "DASHCUPY_LINEINFO": ("0", "1: compile with line information for profilers"),
    "DASHCUPY_KEEP_SOURCE": ("0", "1: keep the expanded source beside each cubin"),
}


def _flag(name: str) -> bool:
    value = os.environ.get(name)
    return value is not None and value.strip().lower() not in ("", "0", "false", "no", "off")


def debug() -> bool:
    """Whether kernels are built with bounded waits (``DASHCUPY_DEBUG``)."""
    return _flag("DASHCUPY_DEBUG")


def lineinfo() -> bool:
    """Whether kernels carry line information (``DASHCUPY_LINEINFO``)."""
    return _flag("DASHCUPY_LINEINFO")


def keep_source() -> bool:
    """Whether the expanded source stays beside each cubin (``DASHCUPY_KEEP_SOURCE``)."""
    return _flag("DASHCUPY_KEEP_SOURCE")


def cache_dir() -> Path:
    """Folder of the compiled kernels (``DASHCUPY_CACHE_DIR``, else the user cache folder)."""
    given = os.environ.get("DASHCUPY_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "dashcupy" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dashcupy"
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "dashcupy"
