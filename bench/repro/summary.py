"""Records of training runs and their comparisons in short: a file small enough to be kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dashcupy.errors import InvalidInputError

from .. import training
from . import record
from .compare import Comparison

# What a summary takes over as it stands.
_KEPT = ("config", "parameters", "backend", "machine", "first_step", "attention", "step_ms_median",
         "peak_memory_bytes")


def summarise(comparisons: Sequence[Comparison]) -> dict:
    """What the compared runs were, and where they part.

    Each list of losses, and all digests of a step or of the final weights, become one SHA-256.

    Raises
    ------
    InvalidInputError
        Two records have one name.
    """
    paths = dict.fromkeys(Path(name) for found in comparisons for name in found.names)
    runs = {path.stem: _short(record.read(path)) for path in paths}
    if len(runs) < len(paths):
        raise InvalidInputError(f"a summary tells runs apart by the names of their files, and of "
                                f"{', '.join(map(str, paths))} some are the same; rename them")
    return {"format": training.FORMAT, "runs": runs,
            "comparisons": [_describe(found) for found in comparisons]}


def _short(run: Mapping) -> dict:
    return {name: run[name] for name in _KEPT if name in run} | {
        "steps": len(run["losses"]), "final_loss": run["losses"][-1],
        "losses": _digest(run["losses_hex"]), "weights": _digest(run["weights"]),
        "gradients": {step: _digest(found) for step, found in run["gradients"].items()}}


def _digest(content: Sequence[str] | Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _describe(found: Comparison) -> dict:
    return {"runs": [Path(name).stem for name in found.names], "labels": found.labels,
            "equal": found.equal, "compared": found.compared, "options": found.options,
            "losses_apart": max(abs(x - y) for x, y in zip(*found.losses, strict=True)),
            "differences": [asdict(one) for one in found.differences]}
