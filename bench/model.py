"""Times of the backward by the simulator: fitted to the measured ones, and kept beside them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from dashcupy import schedules
from dashcupy.backward_table import BACKWARD_TABLE, BackwardKernel
from dashcupy.cli_schedule import MAX_STEPS
from dashcupy.schedules import Shape
from dashcupy.simulate import Costs, simulate

from . import ours, records, timing

WRONG = 0.10  # a prediction that is further off is flagged
# The adds are found from these multiples of the compute time, on lengths up to the longest at which
# heads still share the GPU as they do in all longer ones.
_FIT_LENGTH = 8192
_HOPS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_ADDS, _LATENCIES = (0.2, 0.6), (0.0, 0.5, 1.0, 2.0)
# Hops that fit this little worse than the best one are not told apart from it.
_EQUAL_FIT = 1.1


@dataclass(frozen=True)
class Fit:
    """What the simulator needs to know of one kernel at one head_dim, and how well it then does.

    Parameters
    ----------
    kernel, head_dim
        Of the measured times.
    n
        How many of them were used.
    fixed_ms
        What does not grow with the steps: other kernels, first loads and last stores of a kv tile
        (all cells of a head_dim have as many).
    compute_us, reduce_us, latency_us
        Of a step, see ``dashcupy.simulate.Costs``.
    slots, writer
        How the kernel adds its parts of dq.
    error
        Mean of abs(measured / predicted - 1) over those used.
    least_hop_us, most_hop_us
        reduce + latency that fit as well.
    """

    kernel: str
    head_dim: int
    n: int
    fixed_ms: float
    compute_us: float
    reduce_us: float
    latency_us: float
    slots: int
    writer: str
    error: float
    least_hop_us: float
    most_hop_us: float

    @property
    def ratios(self) -> Costs:
        """Costs in units of the compute time."""
        return Costs(1.0, self.reduce_us / self.compute_us, self.latency_us / self.compute_us,
                     self.slots, self.writer)

    def ms(self, makespan: float) -> float:
        """Time of a run whose makespan is given in units of the compute time."""
        return self.fixed_ms + 1e-3 * self.compute_us * makespan


def usable(found: Iterable[Mapping]) -> list[Mapping]:
    """Backward records of ours that can be simulated, one for each cell and schedule."""
    return [r for (_, schedule), r in records.by_schedule(found).items()
            if (r.get("kernel") or {}).get("resident") and _n_step(r) <= MAX_STEPS
            and schedule in (*schedules.names(), ours.UNORDERED)]


def _shape_of(r: Mapping) -> Shape:
    kernel = r["kernel"]
    return Shape(r["seqlen"], r["kv_len"], kernel["q_tile"], kernel["kv_tile"], r["causal"],
                 r["kv_len"] - r["seqlen"] if r["causal"] else 0)


def _n_step(r: Mapping) -> int:
    shape = _shape_of(r)
    return shape.n_q * shape.n_kv * r["batch"] * r["q_heads"]


def makespan(r: Mapping, costs: Costs) -> float:
    """Simulated time of the run that a record describes, in the units of ``costs``.

    CTAs, tiles and groups of heads are those of the record.
    """
    return _makespan(r["schedule_used"], _shape_of(r), r["batch"] * r["kv_heads"],
                     r["kernel"]["resident"], costs, r["q_heads"] // r["kv_heads"],
                     r["kernel"]["head_group"])


@functools.lru_cache(maxsize=4096)
def _makespan(schedule: str, shape: Shape, n_head: int, n_worker: int, costs: Costs, q_per_kv: int,
              head_group: int) -> float:
    return simulate(schedule, shape, n_head, n_worker, costs, q_per_kv=q_per_kv,
                    head_group=head_group).makespan


def fit(found: Sequence[Mapping]) -> Fit:
    """Costs for records of one kernel at one head_dim.

    ``unordered`` takes no part: it is predicted, too.
    """
    first = found[0]
    kernel = first["kernel"]["name"]
    slots = BACKWARD_TABLE.get(kernel, BackwardKernel()).slots  # it may be one of the past
    writer = "pipelined" if slots else "serial"
    used = [r for r in found if ours.is_deterministic(r["schedule_used"])
            and r["seqlen"] <= _FIT_LENGTH] or list(found)
    measured = np.array([r["ms"] for r in used])
    tried = []
    pairs = product(_ADDS, _LATENCIES) if slots else ((hop, 0.0) for hop in _HOPS)
    for add, latency in pairs:
        spans = np.array([makespan(r, Costs(1.0, add, latency, slots, writer)) for r in used])
        fixed, compute = _line(spans, measured)
        error = float(np.mean(np.abs(measured / (fixed + compute * spans) - 1)))
        tried.append((error, add, latency, fixed, compute))
    error, add, latency, fixed, compute = min(tried)
    hops = [1e3 * c * (a + lag) for e, a, lag, _, c in tried if e <= _EQUAL_FIT * error + 1e-4]
    return Fit(kernel, first["head_dim"], len(used), fixed, 1e3 * compute,
               1e3 * compute * add, 1e3 * compute * latency, slots, writer, error, min(hops),
               max(hops))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """a >= 0 and b of y = a + b x with the least sum of relative deviations.

    Not of their squares: a few cells that something else limits must not bend the others.
    """
    a, b, weights = 0.0, 1.0, np.ones_like(y)
    for _ in range(30):
        columns = np.stack([np.ones_like(x), x], 1) * (weights / y)[:, None]
        a, b = np.linalg.lstsq(columns, weights, rcond=None)[0]
        if a < 0 or len(y) < 2:
            a, b = 0.0, float((weights**2 * x / y).sum() / (weights**2 * (x / y) ** 2).sum())
        weights = np.maximum(np.abs((a + b * x) / y - 1), 1e-3) ** -0.5
    return float(a), float(b)


def predict(found: Iterable[Mapping]) -> dict:
    """Fits of all kernels and the time that they give for every record of one card.

    Returns
    -------
    dict
        ``fits`` and ``predictions``, as the model file holds them.
    """
    groups: dict[tuple, list[Mapping]] = {}
    for r in usable(found):
        groups.setdefault((r["head_dim"], r["kernel"]["name"]), []).append(r)
    fits, predictions = [], []
    for (head_dim, kernel), of_kernel in sorted(groups.items()):
        timing.log(f"simulating {len(of_kernel)} times of {kernel}, head_dim {head_dim}")
        fitted = fit(of_kernel)
        fits.append({name: round(value, 5) if isinstance(value, float) else value
                     for name, value in asdict(fitted).items()})
        predictions += [
            {"cell": list(records.cell_of(r)), "schedule": r["schedule_used"], "kernel": kernel,
             "ms": r["ms"], "predicted_ms": round(fitted.ms(makespan(r, fitted.ratios)), 4)}
            for r in of_kernel]
    return {"fits": fits, "predictions": predictions}


def path_of(results: Path) -> Path:
    """The model file of a results file."""
    return results.with_name(f"{results.stem}_model.json")


def read(results: Path) -> dict | None:
    """The model that belongs to a results file; None if there is none."""
    path = path_of(results)
    return records.load(path) if path.is_file() else None


def write(results: Path, model: Mapping) -> None:
    """Keep a model beside its results, a line for each fit and prediction."""
    parts = [f'"{name}": [\n' + ",\n".join(json.dumps(line) for line in model[name]) + "\n]"
             for name in ("fits", "predictions")]
    path_of(results).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def is_of(model: Mapping, found: Iterable[Mapping]) -> bool:
    """Whether a model was made from these very times."""
    now = {(records.cell_of(r), r["schedule_used"]): r["ms"] for r in usable(found)}
    return now == {key: p["ms"] for key, p in by_schedule(model).items()}


def by_schedule(model: Mapping) -> dict[tuple[tuple, str], Mapping]:
    """Predictions by cell and schedule, as `records.by_schedule` has the measurements."""
    return {(tuple(p["cell"]), p["schedule"]): p for p in model["predictions"]}
