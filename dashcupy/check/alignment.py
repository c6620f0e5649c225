"""How somebody else's function aligns its causal mask when the lengths differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import InvalidInputError
from ..problem import CAUSAL_ARGUMENT, Problem
from .function import Function
from .inputs import make_inputs
from .subject import FORWARD
from .truth import Truth

ALIGNMENTS = ("bottom_right", "top_left")


def find_alignment(subject: Function, problem: Problem) -> tuple[str, str]:
    """The alignment that a function declares, or that fits its results best.

    Parameters
    ----------
    subject
    problem
        Causal, with lengths that differ.

    Returns
    -------
    alignment
        One of ``ALIGNMENTS``.
    text
        How that is known, for a person.

    Raises
    ------
    InvalidInputError
        The lengths are too large to compare with float64.
    """
    if subject.causal_alignment:
        return subject.causal_alignment, (f"{subject.title} aligns its causal mask "
                                          f"{subject.causal_alignment}")
    inputs = make_inputs("normal", problem)
    truths = {alignment: Truth(replace(problem, mask=CAUSAL_ARGUMENT[alignment]), inputs)
              for alignment in ALIGNMENTS}
    if not all(truth.sample for truth in truths.values()):
        raise InvalidInputError(
            f"--causal: {subject.title} may align its mask bottom_right or top_left, and "
            f"sequences this long are not compared with float64 to find out: give --causal "
            f"bottom_right or --causal top_left, or smaller --len and --kv-len")
    arrays = {name: subject.place.put(array) for name, array in inputs.items()}
    out = subject.place.get(subject.compute(problem, FORWARD, arrays, {})["out"])
    out = np.where(out == out, out, out.dtype.type(0))  # NaN: what others give for "sees no key"
    reports = {alignment: truth.compare("out", out)[0] for alignment, truth in truths.items()}
    found = min(reports, key=lambda alignment: reports[alignment].frobenius_error)
    errors = ", ".join(f"{report.frobenius_error:.1e} for {alignment}"
                       for alignment, report in reports.items())
    fits = "is aligned" if reports[found].ok else "is closest to"
    return found, (f"the causal mask of {subject.title} {fits} {found} (relative error of out: "
                   f"{errors})")
