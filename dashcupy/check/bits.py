"""Compare results bit by bit: how many elements differ, where the first lies, both in hex."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

# comparison -> what is done otherwise than in the first call
TESTS = {
    "repeats": "the same call again",
    "load": "the same call again, beside other work that comes and goes",
    "alone": "one sequence with one kv head, alone in the batch",
    "batch": "one sequence more, and all of them in reverse order",
    "strided": "q, k, v and dout as strided views, heads before rows",
    "graph": "recorded into a CUDA graph and replayed",
    "process": "computed in a second process (by digests)",
}


@dataclass(frozen=True)
class Difference:
    """What one comparison found wrong with one tensor.

    Parameters
    ----------
    test
        A key of ``TESTS``.
    n_bad, n_call
        Calls with other bits, and calls made.
    count, size
        Elements that differ in the first such call, and elements there are.
    index
        Of the first of them.
    got, expected
        Its bits then and in the first call, in hexadecimal.
    place
        The tile that it lies in, and how that is summed; "" where that is not known.
    """

    test: str
    n_bad: int
    n_call: int
    count: int
    size: int
    index: tuple[int, ...]
    got: str
    expected: str
    place: str = ""

    def __str__(self) -> str:
        calls = f" ({self.n_bad} of {self.n_call} calls)" if self.n_call > 1 else ""
        if not self.size:  # only digests are known
            return f"other bits: {self.test}{calls}: digest {self.got}, not {self.expected}"
        text = (f"other bits: {self.test}{calls}: {self.count} of {self.size} elements, first at "
                f"{list(self.index)}: {self.got}, not {self.expected}")
        return f"{text}; {self.place}" if self.place else text


def first_difference(got: np.ndarray, expected: np.ndarray
                     ) -> tuple[int, tuple[int, ...], str, str] | None:
    """(count, first index, its bits in ``got`` and in ``expected``); None if all bits are equal.

    Parameters
    ----------
    got, expected : ndarray
        Of one shape and dtype. NaN equals NaN of the same bits, 0.0 is not -0.0.
    """
    got, expected = _words(got), _words(expected)
    different = got != expected
    count = int(np.count_nonzero(different))
    if not count:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), got.shape))
    return count, index, _hex(got[index]), _hex(expected[index])


def digest(array: np.ndarray) -> str:
    """SHA-256 of the bytes in C order, little-endian, in hexadecimal."""
    words = _words(array)
    return hashlib.sha256(words.astype(words.dtype.newbyteorder("<"), copy=False)).hexdigest()


def _words(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def _hex(word: np.unsignedinteger) -> str:
    return f"0x{int(word):0{2 * word.dtype.itemsize}x}"
