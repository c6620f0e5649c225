"""Right values and allowed errors on the GPU: dashcupy.reference in torch, whole batches at once.

The formulas and the bounds are those of ``dashcupy/reference.py``, which the CPU tests check.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU tests compute their right values with torch")

NAMES = ("out", "lse", "dq", "dk", "dv")
# What a fair kernel may err, as a multiple of the error of the plain formula in its precision.
FACTOR = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
FLOOR = 32 * torch.finfo(torch.float32).eps
# What a sum in float32 may err, of the sum of its terms' sizes: tensor cores cut off what does not
# fit, where the plain formula rounds to nearest or, by an algorithm that cuBLAS is free to choose,
# makes next to no error.
SUMS = 4 * torch.finfo(torch.float32).eps


def visible(q_len: int, kv_len: int, mask: str, device) -> torch.Tensor:
    """Whether row i sees key j: ``j <= i + offset``."""
    if mask == "full":
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    offset = kv_len - q_len if mask == "causal" else 0
    rows = torch.arange(q_len, device=device)[:, None]
    return torch.arange(kv_len, device=device) <= rows + offset


def attention(q, k, v, dout, mask: str, scale: float | None = None, dtype=None,
              dlse=None) -> dict:
    """Results of forward and backward by the plain formula.

    Parameters
    ----------
    q, dout : tensor, [batch, q_len, n_q_head, head_dim]
    k, v : tensor, [batch, kv_len, n_kv_head, head_dim]
    mask : str
        ``"full"``, ``"causal"`` or ``"causal_top_left"``.
    dtype : torch.dtype, optional
        None: everything in float64. Else the yardstick: sums in float32, and what a matrix
        product reads is rounded to this dtype.
    dlse : tensor, [batch, n_q_head, q_len], optional
        Gradient with respect to lse; not looked at where a row sees no key.

    Returns
    -------
    dict
        ``out, lse, dq, dk, dv``; float64, or for the yardstick rounded to ``dtype`` (lse: float32).
        In float64 also ``dq_terms, dk_terms``, as ``attention_backward_terms`` of the reference.
    """
    sums = torch.float64 if dtype is None else torch.float32

    def operand(x):
        return x.to(dtype or sums).to(sums)

    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q_, dout_ = (operand(x).transpose(1, 2) for x in (q, dout))
    k_, v_ = (operand(x).transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scores = q_ @ k_.mT * scale
    scores.masked_fill_(~visible(q.shape[1], k.shape[1], mask, q.device), float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True) if k.shape[1] else \
        scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    p = torch.where(lse == float("-inf"), 0.0, torch.exp(scores - lse))
    out = operand(operand(p) @ v_)
    delta = (out * dout_).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= torch.where(lse == float("-inf"), 0.0, dlse[..., None].to(sums))
    ds = operand(p * (dout_ @ v_.mT - delta))
    dv = _sum_groups(operand(p).mT @ dout_, group)
    dk = _sum_groups(ds.mT @ q_, group) * scale
    dq = ds @ k_ * scale
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    if dtype is None:
        terms = p * (dout_.abs() @ v_.abs().mT)
        found["dq_terms"] = terms @ k_.abs() * scale
        found["dk_terms"] = _sum_groups(terms.mT @ q_.abs(), group) * scale
    return {name: x.transpose(1, 2).to(dtype or sums) for name, x in found.items()} | {
        "lse": lse[..., 0]}


def _sum_groups(x, group: int):
    batch, n_q_head, length, head_dim = x.shape
    return x.reshape(batch, n_q_head // group, group, length, head_dim).sum(2)


def faults(got: dict, exact: dict, yardstick: dict) -> list[str]:
    """What is wrong with results, one line a tensor; empty when all are within their bounds."""
    found = []
    for name, result in got.items():
        truth = exact[name]
        if tuple(result.shape) != tuple(truth.shape):
            found.append(f"{name}: shape {tuple(result.shape)}, expected {tuple(truth.shape)}")
        elif result.numel():
            found += _lse_fault(result, truth) if name == "lse" else \
                _fault(name, result, truth, yardstick[name], exact.get(f"{name}_terms"))
    return found


def _lse_fault(got, truth) -> list[str]:
    """1e-3 for |lse| up to 100, and in proportion beyond; the infinities must be the same ones."""
    error = torch.where(got.double() == truth, 0.0, (got.double() - truth).abs())
    allowed = 1e-3 * (truth.abs().nan_to_num(posinf=0.0) / 100).clamp(min=1.0)
    if bool((error <= allowed).all()):
        return []
    return [f"lse: error {float(error.max()):.3g} (allowed 1e-3 up to |lse| = 100), "
            f"{_worst(error / allowed)}"]


def _fault(name: str, got, truth, yardstick, terms) -> list[str]:
    """The rule of ``dashcupy.reference.error_report``."""
    eps, factor = torch.finfo(got.dtype).eps, FACTOR[name]
    error, fair = (got.double() - truth).abs(), (yardstick.double() - truth).abs()
    norm = truth.norm()
    max_bound = factor * fair.max() + 2 * eps * truth.abs().max() + FLOOR
    norm_bound = factor * fair.norm() + eps * norm + FLOOR * truth.numel() ** 0.5
    if terms is not None:
        max_bound, norm_bound = max_bound + SUMS * terms.max(), norm_bound + SUMS * terms.norm()
    # Written so that a NaN fails.
    if bool(error.max() <= max_bound) and bool(error.norm() <= norm_bound):
        return []
    return [f"{name}: max error {float(error.max()):.3g} (allowed {float(max_bound):.3g}), "
            f"Frobenius {float(error.norm()):.3g} (allowed {float(norm_bound):.3g}) of "
            f"{float(norm):.3g}, {_worst(error)}"]


def _worst(error) -> str:
    bad = int(error.isnan().sum())
    index = int(error.nan_to_num(nan=float("inf")).argmax())
    where = []
    for size in reversed(error.shape):
        index, rest = divmod(index, size)
        where.insert(0, rest)
    return f"{bad} NaN, worst at {where}"
