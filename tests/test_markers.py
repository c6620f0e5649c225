"""Which tests run: slow ones only where they are asked for, whatever else -m says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("given, quick, slow", [
    ((), True, False), (("-m", "not gpu"), True, False), (("-m", ""), True, True),
    (("-m", "slow"), False, True), (("-m", "not gpu or slow"), True, True)], ids=str)
def test_slow_tests_are_left_out_unless_they_are_named(given, quick, slow):
    """``-m gpu`` ran them, too: it takes the place of the ``not slow`` of pyproject.toml."""
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *given,
                           "tests/test_simulate.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name, wanted in (("[4-1]", quick), ("[128-16]", slow)):
        assert (f"test_table_of_makespans{name}" in done.stdout) == wanted, done.stdout
