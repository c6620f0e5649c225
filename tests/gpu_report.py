"""Record of a GPU run: which code was tested on which card, for those who have no GPU."""

from __future__ import annotations

import datetime
import json
import re
import time
from pathlib import Path

from dashcupy import driver, nvrtc, source

PATH = Path(__file__).with_name("gpu_report.json")
_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_PHASES = ("setup", "call", "teardown")


class GpuReport:
    """pytest plugin: a session with ``-m gpu`` that ran a GPU test writes ``gpu_report.json``.

    Parameters
    ----------
    path
        Where to write.
    arguments
        Command line of the session, for the record.
    """

    def __init__(self, path: Path, arguments: list[str]):
        self._path = path
        self._arguments = arguments
        self._start = time.time()
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        """Keep the worst outcome of set-up, call and tear-down of each GPU test.

        What pytest-xdist reports of a test that ended its worker is none of these, and has no
        keywords.
        """
        is_crash = report.when not in _PHASES
        if not is_crash and "gpu" not in report.keywords and "sm90" not in report.keywords:
            return
        before = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(before, report.outcome, key=_RANK.get)

    def pytest_sessionfinish(self):
        """Write the record, unless every test was skipped."""
        counts = {outcome: list(self._outcomes.values()).count(outcome) for outcome in _RANK}
        if counts["passed"] + counts["failed"] == 0:
            return
        now = datetime.datetime.now(datetime.timezone.utc)
        record = {
            "source_digest": source.source_digest(), **_machine(), **counts,
            "seconds": round(time.time() - self._start, 1),
            "date": now.isoformat(timespec="seconds"), "arguments": self._arguments}
        self._path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def wanted(config) -> bool:
    """Whether this session asks for GPU tests, and is not a worker of another one."""
    expression = config.getoption("markexpr", "") or ""
    return (re.search(r"(?<!not )\bgpu\b", expression) is not None
            and not hasattr(config, "workerinput"))


def complaint(path: Path = PATH) -> str:
    """What is wrong with the record on disk (missing, of other code, failures); "" if fine."""
    if not path.is_file():
        return f"there is no {path.name}: the GPU tests have not been run; {_ADVICE}"
    record = json.loads(path.read_text(encoding="utf-8"))
    ran = f"{path.name} of {record['date']} ({record['device']})"
    if record["source_digest"] != source.source_digest():
        return f"{ran} was made by other code than this; {_ADVICE}"
    if record["failed"]:
        return f"{ran} says that {record['failed']} GPU tests failed"
    return ""


_ADVICE = "run `python -m pytest -m gpu` on a machine with a GPU"


def _machine() -> dict[str, str]:
    gpu = driver.devices()[0]
    return {"device": gpu.name,
            "compute_capability": "{}.{}".format(*gpu.compute_capability),
            "driver": "CUDA {}.{}".format(*driver.version()),
            # The version alone: a path would say how somebody's machine is laid out.
            "cupy": driver.require_cupy().__version__,
            "nvrtc": "{}.{}".format(*nvrtc.default_library().version)}
