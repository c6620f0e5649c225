"""`--expect FILE`: are the bits here those of another machine, where they must be?"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInputError


@dataclass(frozen=True)
class Comparison:
    """Results here beside those of another record.

    Parameters
    ----------
    file, other
        The record, and where it was made.
    n_equal
        Tensors with equal bits.
    different
        Those with other bits although their fingerprints are equal, in words.
    incomparable
        Runs that nothing in the other record can be compared with, and why.
    """

    file: str
    other: str
    n_equal: int
    different: tuple[str, ...]
    incomparable: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every result here is known to have the other's bits."""
        return self.n_equal > 0 and not self.different and not self.incomparable


def compare_records(here: dict, there: dict, file: str) -> Comparison:
    """Compare digests of all runs of ``here`` with those of ``there``.

    Parameters
    ----------
    here, there
        As `dashcupy.check.record.make_record` makes them.
    file
        Where ``there`` comes from, for messages.

    Raises
    ------
    InvalidInputError
        ``there`` lacks what a record has.
    """
    try:
        return _compare(here, there, file)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"--expect {file}: not a whole record ({type(error).__name__}: "
                                f"{error}); write it again with `check --json`") from error


def _compare(here: dict, there: dict, file: str) -> Comparison:
    arithmetic = _two(here["device"]["arithmetic"], there["device"]["arithmetic"])
    others = {_key(case, run): (case, run) for case in there["cases"] for run in case["runs"]}
    n_equal, different, incomparable = 0, [], []
    for case in here["cases"]:
        for run in case["runs"]:
            title = f"{case['case']['title']}, {case['case']['problem']['mask']}, {run['name']}"
            if not run["tensors"]:
                continue  # it was refused here, which has been told
            other_case, other = others.get(_key(case, run), (None, None))
            reason = (
                f"the inputs are others (of --seed {there['settings']['seed']} there)"
                if other and case["inputs_digest"] != other_case["inputs_digest"] else
                _incomparable(run, other, arithmetic))
            if reason:
                incomparable.append(f"{title}: {reason}")
                continue
            digests = {tensor["name"]: tensor["digest"] for tensor in other["tensors"]}
            for tensor in run["tensors"]:
                expected = digests.get(tensor["name"])
                if tensor["digest"] == expected:
                    n_equal += 1
                else:
                    different.append(f"{title}: {tensor['name']} has digest "
                                     f"{tensor['digest'][:16]} here, {str(expected)[:16]} there")
    return Comparison(file, f"{there['subject']} on {there['device']['title']}", n_equal,
                      tuple(different), tuple(incomparable))


def _key(case: dict, run: dict) -> tuple:
    return (case["case"]["inputs"], *sorted(case["case"]["problem"].items()), run["name"])


def _incomparable(run: dict, other: dict | None, arithmetic: str) -> str:
    """Why equal bits are not promised; "" if they are."""
    if other is None:
        return "there is no such run there: check the same shape and schedules at both sites"
    if not other["tensors"]:
        return f"refused there: {other['refused']}"
    if run["fingerprint"] != other["fingerprint"]:
        pairs = zip(run["fingerprint"].split(":"), other["fingerprint"].split(":"))
        parts = [_two(a, b) for a, b in pairs if a != b]
        return f"the fingerprints differ ({', '.join(parts)}), so bits may"
    if arithmetic:
        return f"the arithmetic differs ({arithmetic}), so bits may"
    return ""


def _two(here: str, there: str) -> str:
    """Both values if they differ, else ""."""
    return "" if here == there else f"{here} here, {there} there"
