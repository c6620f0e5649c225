"""Inputs of the check: the same bytes for a seed on every machine, Python and NumPy."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

from ..problem import Problem

# kind of the values of q, k, v, dout -> what is hard about them
INPUTS = {
    "normal": "bell-shaped around 0",
    "deep": "every score near -120, so lse is far below -88, where exp of a padded score overflows",
    "one_hot": "scores so far apart that one key takes each row",
}
_NAMES = ("q", "k", "v", "dout")
_DEEP_SCORE = -120.0
_DEEP_Q = 8.0
_ONE_HOT_FACTOR = 20.0


def make_inputs(kind: str, problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    """``q``, ``k``, ``v`` and ``dout``.

    Every value is an integer times a power of two, from the counter-based generator Philox
    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), rounded once to the
    dtype. Only exact operations and IEEE roundings are used, so that two machines can compare the
    bits of their results without exchanging inputs.

    Parameters
    ----------
    kind
        A key of ``INPUTS``.
    problem
        Sizes, dtype and scale.
    seed
        0 to 2**64 - 1.

    Returns
    -------
    dict of ndarray
        In the dtype of the problem; q and dout [batch, q_len, n_q_head, head_dim], k and v
        [batch, kv_len, n_kv_head, head_dim].
    """
    q_shape = (problem.batch, problem.q_len, problem.n_q_head, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_len, problem.n_kv_head, problem.head_dim)
    dtype = np.dtype(getattr(ml_dtypes, problem.dtype, problem.dtype))
    arrays = {}
    for stream, name in enumerate(_NAMES):
        array = _bell(kv_shape if name in "kv" else q_shape, seed, stream)
        with np.errstate(over="ignore"):  # of "deep" with a tiny scale: `Truth` refuses it
            if kind == "deep" and name in "qk":
                array *= 0.5
                array[..., 0] = _DEEP_Q if name == "q" else _DEEP_SCORE / (_DEEP_Q * problem.scale)
            elif kind == "one_hot" and name == "q":
                array *= _ONE_HOT_FACTOR
            arrays[name] = array.astype(dtype)
    return arrays


def digest_of(arrays: dict[str, np.ndarray]) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes, in hexadecimal."""
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype.name} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8))
    return found.hexdigest()


def _bell(shape: tuple[int, ...], seed: int, stream: int) -> np.ndarray:
    """Sums of four 16-bit random numbers, centred, times 2**-15: within -4 .. 4, deviation 1.15."""
    size = int(np.prod(shape))
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(size)
    quarters = words.astype("<u8", copy=False).view("<u2").reshape(size, 4)
    total = quarters[:, 0].astype(np.int32)
    for i in range(1, 4):
        total += quarters[:, i]
    total -= 2 * (2**16 - 1)
    return (total.astype(np.float32) * np.float32(2.0**-15)).reshape(shape)
