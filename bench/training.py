"""The summary that ``bench.train_repro --summary`` wrote, as Markdown; needs no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from dashcupy.errors import InvalidInputError

from . import records, tables

FORMAT = "dashcupy training summary 1"


def path_of(results: Path) -> Path:
    """The summary beside a results file."""
    return results.with_name(f"{results.stem}_repro.json")


def read(results: Path) -> dict | None:
    """The summary beside a results file; None if there is none.

    Raises
    ------
    InvalidInputError
        The file holds something else.
    """
    path = path_of(results)
    if not path.is_file():
        return None
    made = records.load(path)
    if not isinstance(made, dict) or made.get("format") != FORMAT or "runs" not in made:
        raise InvalidInputError(f"{path} is no summary of training runs; write it with "
                                f"bench.train_repro --compare A B --summary {path}")
    return made


def of_first_model(made: Mapping) -> dict:
    """What a summary says of the model of its first comparison: as much as a picture can show."""
    settings = [_setting(_runs(made, found)[0]) for found in made["comparisons"]]
    kept = [found for found, setting in zip(made["comparisons"], settings, strict=True)
            if setting == settings[0]]
    names = {name for found in kept for name in found["runs"]}
    return {**made, "comparisons": kept,
            "runs": {name: run for name, run in made["runs"].items() if name in names}}


def short(made: Mapping) -> str:
    """The comparisons of the first model, a line each."""
    run = _runs(made, made["comparisons"][0])[0]
    return "\n".join([
        f"Measured on {run['machine']['device']}, {run['machine']['date']}: {_setting(run)}, "
        f"{run['config']['steps']} steps, source {run['machine']['source_digest'][:12]}.", "",
        *(_line(made, found) for found in of_first_model(made)["comparisons"])])


def _line(made: Mapping, found: Mapping) -> str:
    verdict = "all bits equal" if found["equal"] else "different"
    evidence = found["compared"] if found["equal"] else _differences(found)
    times, shares = (show(made, found, " and ") for show in (_times, _shares))
    return (f"- **{_pair(made, found)}: {verdict}** ({evidence}). Median step {times} ms, "
            f"attention {shares} % of it.")


def table(made: Mapping) -> str:
    """A row for each comparison, with the machines above."""
    machines = dict.fromkeys(_machine(run["machine"]) for run in made["runs"].values())
    head = ["runs", "model, a step", "backward", "compared", "bits", "final loss",
            "median step, ms", "attention, %"]
    return "\n".join([*machines, "", *tables.table(
        head, (_row(made, found) for found in made["comparisons"]))])


def _row(made: Mapping, found: Mapping) -> list[str]:
    runs = _runs(made, found)
    backward = dict.fromkeys(run["attention"].get("schedule_used", run["attention"]["backward"])
                             for run in runs)
    return [_pair(made, found), _setting(runs[0]), ", ".join(f"`{name}`" for name in backward),
            found["compared"],
            "equal" if found["equal"] else f"different: {_differences(found)}",
            ", ".join(dict.fromkeys(f"{run['final_loss']:.9g}" for run in runs)),
            _times(made, found, ", "), _shares(made, found, ", ")]


def _runs(made: Mapping, found: Mapping) -> list[Mapping]:
    return [made["runs"][name] for name in found["runs"]]


def _setting(run: Mapping) -> str:
    config = run["config"]
    several = (f", {config['processes']} processes ({config['parallel']}, {run['backend']})"
               if config["processes"] > 1 else "")
    return (f"{run['parameters'] / 1e6:.1f} M parameters, {config['dtype']}, {config['batch']} x "
            f"{config['seqlen']} bytes a step{several}")


def _pair(made: Mapping, found: Mapping) -> str:
    first, second = (
        label if run["attention"]["backward_mode"] == "deterministic"
        else f"{label} ({run['attention']['backward_mode']})"
        for label, run in zip(found["labels"], _runs(made, found), strict=True))
    return f"{first}, two runs" if first == second else f"{first} and {second}"


def _differences(found: Mapping) -> str:
    ordered = sorted(found["differences"],
                     key=lambda one: math.inf if one["step"] is None else one["step"])
    return "; ".join(_difference(one, found["losses_apart"]) for one in ordered)


def _difference(one: Mapping, losses_apart: float) -> str:
    what, count = one["what"], f"{one['n_differ']} of {one['n']}"
    if one["step"] is None:
        return f"{what} in {count} tensors"
    if one["tensor"]:
        return (f"{what} with digests first at step {one['step']}, {count} tensors, "
                f"`{one['tensor']}` first in the backward")
    apart = f", by {losses_apart:.2g} at most" if what == "loss" else ""
    return f"{what} first at step {one['step']}, at {count} steps{apart}"


def _times(made: Mapping, found: Mapping, between: str) -> str:
    return between.join(f"{run['step_ms_median']:.1f}" for run in _runs(made, found))


def _shares(made: Mapping, found: Mapping, between: str) -> str:
    return between.join(f"{100 * run['attention']['share_of_step']:.0f}"
                        for run in _runs(made, found))


def _machine(machine: Mapping) -> str:
    parts: Iterable[str] = (
        f"{name} {value}" for name, value in (
            ("driver", machine.get("driver")), ("CUDA", machine.get("cuda")),
            *((name, machine["versions"].get(name)) for name in (
                "torch", "cudnn", "nvidia-cuda-nvrtc", "dashcupy"))) if value)
    return (f"**Training** on {machine['device']}, {machine['date']}: {', '.join(parts)}, source "
            f"{machine['source_digest'][:12]}.")
