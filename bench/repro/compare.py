"""Two records of training runs: equal to the bit, or the first step and tensor that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dashcupy.errors import InvalidInputError

from . import record


@dataclass(frozen=True)
class Difference:
    """Where two runs part first, in one respect.

    Parameters
    ----------
    what
        ``loss``, ``gradient norm``, ``gradients`` or ``final weights``.
    step
        The first; None for the final weights.
    tensor
        One that differs, of gradients the first that the backward reaches; None for numbers.
    n_differ, n
        How many steps, or tensors of that step, differ, and of how many.
    words
        All of it for a person, with the values.
    """

    what: str
    step: int | None
    tensor: str | None
    n_differ: int
    n: int
    words: str


@dataclass(frozen=True)
class Comparison:
    """What two records have in common, and where they part.

    Parameters
    ----------
    names
        The two files.
    labels
        What each was, for a legend: its attention, schedule, and where it was resumed.
    steps
        Steps that both hold.
    losses
        Losses of the two at these steps.
    compared
        What was compared, in words.
    options
        Options, versions and machines that were not the same, in words.
    differences
        What differs; none if the runs are equal.
    times
        What a step took, and attention's share of it, in words.
    """

    names: tuple[str, str]
    labels: tuple[str, str]
    steps: range
    losses: tuple[list[float], list[float]]
    compared: str
    options: tuple[str, ...]
    differences: tuple[Difference, ...]
    times: str

    @property
    def equal(self) -> bool:
        """Whether every bit that was compared is the same."""
        return not self.differences

    def report(self) -> str:
        """Some lines for a person."""
        lines = [f"{self.names[0]} and {self.names[1]}: "
                 f"{'EQUAL' if self.equal else 'DIFFERENT'} ({self.compared})"]
        lines += [f"  option: {text}" for text in self.options]
        lines += [f"  {found.words}" for found in self.differences]
        return "\n".join([*lines, f"  {self.times}"])


def compare(path_a: Path, path_b: Path) -> Comparison:
    """Compare all that two records both hold.

    Raises
    ------
    InvalidInputError
        A file is no whole record, or the two have no step in common.
    """
    try:
        return _compare(path_a, path_b)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"{path_a} or {path_b} is not a whole record "
                                f"({type(error).__name__}: {error}); train again with --json"
                                ) from error


def _compare(path_a: Path, path_b: Path) -> Comparison:
    a, b = record.read(path_a), record.read(path_b)
    steps = range(max(a["first_step"], b["first_step"]), min(_end(a), _end(b)))
    if not steps:
        raise InvalidInputError(f"{path_a} has steps {a['first_step']} to {_end(a) - 1}, {path_b} "
                                f"{b['first_step']} to {_end(b) - 1}: none in common")
    hashed = [step for step in map(str, steps) if step in a["gradients"] and step in b["gradients"]]
    same_end = _end(a) == _end(b)
    found = [_first_loss(a, b, steps), _first_norm(a, b, steps), _first_gradient(a, b, hashed)]
    if same_end:
        found.append(_weights(a, b))
    return Comparison(
        (str(path_a), str(path_b)), (_label(a), _label(b)), steps,
        tuple([r["losses"][step - r["first_step"]] for step in steps] for r in (a, b)),
        f"losses and gradient norms of steps {steps[0]} to {steps[-1]}, all gradients at "
        f"{len(hashed)} of them, {'final weights' if same_end else 'not the final weights'}",
        tuple(_options(_all_options(a), _all_options(b))), tuple(one for one in found if one),
        f"median step {_time(a)} and {_time(b)}")


def _end(r: Mapping) -> int:
    return r["first_step"] + len(r["losses"])


def _label(r: Mapping) -> str:
    name, schedule, first = r["config"]["attention"], r["config"]["schedule"], r["first_step"]
    name += "" if schedule == "auto" else f", {schedule}"
    return f"{name}, resumed at step {first}" if first else name


def _time(r: Mapping) -> str:
    share = 100 * r["attention"]["share_of_step"]
    return f"{r['step_ms_median']:.1f} ms (attention {share:.0f} %)"


def _all_options(r: Mapping) -> dict:
    """What the bits of a run depend on, and its name for it."""
    machine = r["machine"]
    return r["config"] | machine["versions"] | {
        "machine": machine["device"], "source_digest": machine["source_digest"],
        "threads": r["deterministic"]["threads"]}


def _options(a: Mapping, b: Mapping) -> Iterable[str]:
    return (f"{name} {a.get(name)} and {b.get(name)}" for name in sorted({*a, *b})
            if a.get(name) != b.get(name))


def _first_loss(a: Mapping, b: Mapping, steps: range) -> Difference | None:
    return _first_number(a, b, steps, "losses", "loss")


def _first_norm(a: Mapping, b: Mapping, steps: range) -> Difference | None:
    return _first_number(a, b, steps, "gradient_norms", "gradient norm")


def _first_number(a: Mapping, b: Mapping, steps: range, field: str, name: str
                  ) -> Difference | None:
    pairs = [(step, *(float(r[field][step - r["first_step"]]).hex() for r in (a, b)))
             for step in steps]
    other = [(step, x, y) for step, x, y in pairs if x != y]
    if not other:
        return None
    step, x, y = other[0]
    return Difference(name, step, None, len(other), len(pairs), (
        f"{name} first differs at step {step}: {float.fromhex(x):.9g} ({x}) and "
        f"{float.fromhex(y):.9g} ({y}); it differs at {len(other)} of {len(pairs)} steps"))


def _first_gradient(a: Mapping, b: Mapping, hashed: list[str]) -> Difference | None:
    for step in hashed:
        other = _differing(a["gradients"][step], b["gradients"][step])
        if other:
            n = len(a["gradients"][step])
            # The backward goes from the last layer to the first, so the last name is the one that
            # it reached first.
            return Difference("gradients", int(step), other[-1], len(other), n, (
                f"gradients first differ at step {step} (of those with digests) in {other[-1]}, "
                f"the first that the backward reaches; {len(other)} of {n} tensors differ"))
    return None


def _weights(a: Mapping, b: Mapping) -> Difference | None:
    other = _differing(a["weights"], b["weights"])
    if not other:
        return None
    n = len(a["weights"])
    return Difference("final weights", None, other[0], len(other), n, (
        f"final weights differ in {len(other)} of {n} tensors, for example {other[0]}"))


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
