"""Text as bytes, and the batch of a step from the seed and the step alone."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dashcupy.errors import InvalidInputError

SUFFIXES = (".py", ".txt", ".md", ".rst")
VOCABULARY = 256  # tokens are bytes
_NOT_THE_LIBRARY = {"site-packages", "dist-packages"}  # what was installed differs by machine


@dataclass(frozen=True)
class Text:
    """Bytes to learn from.

    Parameters
    ----------
    content
        uint8, one axis.
    source
        Where it came from.
    n_file
        How many files were put together.
    """

    content: np.ndarray
    source: str
    n_file: int

    def describe(self) -> dict:
        """What a record keeps: equal digests mean equal text."""
        return {"source": self.source, "files": self.n_file, "bytes": len(self.content),
                "sha256": hashlib.sha256(self.content).hexdigest()}


def read(path: str | Path | None = None) -> Text:
    """Read a file, or all text files below a folder, sorted by their path within it.

    Parameters
    ----------
    path
        None: the Python files of the running interpreter's standard library.

    Raises
    ------
    InvalidInputError
        Nothing to read there.
    """
    root = Path(path or sysconfig.get_path("stdlib"))
    if not root.exists():
        raise InvalidInputError(f"--text {root}: there is no such file or folder")
    suffixes = SUFFIXES if path else (".py",)
    files = [root] if root.is_file() else [
        file for file in root.rglob("*")
        if file.suffix in suffixes and file.is_file()
        and (path or not _NOT_THE_LIBRARY & set(file.relative_to(root).parts))]
    if not files:
        raise InvalidInputError(f"--text {root}: no file in it ends in {', '.join(suffixes)}; "
                                f"give a folder with such files, or one file of any kind")
    # Folders list their files in any order, so the paths are sorted, in the same way everywhere.
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    content = b"".join(file.read_bytes() for file in files)
    return Text(np.frombuffer(content, np.uint8), str(root), len(files))


def batch(text: Text, seed: int, step: int, size: int, seqlen: int) -> np.ndarray:
    """The sequences of one step.

    They depend on the arguments alone, so a run that goes on from the middle sees what the whole
    run saw. Philox is a counter-based generator: NumPy promises its raw numbers for good.

    Returns
    -------
    array, shape [size, seqlen + 1], int64
        Tokens, and at the end the one that follows them.

    Raises
    ------
    InvalidInputError
        The text is shorter than one sequence.
    """
    n_start = len(text.content) - seqlen
    if n_start < 1:
        raise InvalidInputError(f"{text.source} has {len(text.content)} bytes, and a sequence "
                                f"takes {seqlen + 1}; give more --text or a smaller --seqlen")
    starts = np.random.Philox(key=[seed, step]).random_raw(size) % np.uint64(n_start)
    return text.content[starts.astype(np.int64)[:, None] + np.arange(seqlen + 1)].astype(np.int64)
