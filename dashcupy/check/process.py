"""The same results once more in a second process, compared by their digests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DeviceError
from ..source import PACKAGE
from .bits import Difference
from .record import read_record
from .run import DIFFERENT, EQUAL, CaseResult, RunResult

TEST = "process"
# The second process computes every result once, and compares nothing.
OPTIONS = ("--repeats", "1", "--digests-only")


def run_process(arguments: Sequence[str]) -> dict:
    """Record of a second process of the command, with only the digests in it.

    Parameters
    ----------
    arguments
        Of ``python -m dashcupy check``, those that say what to compute.

    Raises
    ------
    DeviceError
        The process fails.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [sys.executable, "-m", "dashcupy", "check", *arguments, *OPTIONS,
                   "--json", str(file)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode not in (0, 1):
            raise DeviceError(f"the second process ended with status {done.returncode}: "
                              f"{done.stderr.strip()[-500:]}; to do without it, leave {TEST} "
                              f"out of --bits")
        return read_record(str(file))


def with_process(result: CaseResult, record: dict) -> CaseResult:
    """``result`` with the comparison with the second process in it."""
    runs = {(case["case"]["title"], case["case"]["problem"]["mask"], run["name"]): run
            for case in record["cases"] for run in case["runs"]}
    key = (result.case.title, result.case.problem.mask)
    return replace(result, runs=tuple(_compared(run, runs[(*key, run.name)]) if run.tensors else run
                                      for run in result.runs))


def _compared(run: RunResult, other: dict) -> RunResult:
    digests = {tensor["name"]: tensor["digest"] for tensor in other["tensors"]}
    tensors = tuple(
        tensor if digests.get(tensor.name) == tensor.digest else replace(
            tensor, differences=(*tensor.differences, Difference(
                TEST, 1, 1, 0, 0, (), str(digests.get(tensor.name))[:16], tensor.digest[:16])))
        for tensor in run.tensors)
    return replace(run, tensors=tensors, tests=run.tests | {
        TEST: EQUAL if tensors == run.tensors else DIFFERENT})
