"""What the random tests rest on: the same draws in every process, and bounds that a right result
keeps."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from random_problems import keeper

TESTS = Path(__file__).resolve().parent
DRAWS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from hypothesis import HealthCheck, given, seed, settings
from random_problems import SEED, problems

found = []

@seed(SEED)
@settings(max_examples=300, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems([(64, "bfloat16")], tiles=(64, 128), most=450, layouts=("plain", "odd rows")))
def draw(problem):
    found.append(problem)

draw()
print(found)
"""


def test_a_problem_is_kept_where_there_is_a_cache():
    """``-p no:cacheprovider`` was an AttributeError before the first problem."""
    kept = {}
    keeper(SimpleNamespace(cache=SimpleNamespace(set=kept.__setitem__)))("a problem")
    keeper(SimpleNamespace())("another")
    assert kept == {"dashcupy/fuzz": "'a problem'"}


def test_draws_do_not_depend_on_what_is_imported():
    # A failure among all tests that does not come back when its test runs alone.
    def draws(*modules):
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        return subprocess.run([sys.executable, "-c", DRAWS, *modules], capture_output=True,
                              text=True, check=True, timeout=120,
                              env=os.environ | {"PYTHONPATH": paths}).stdout

    alone = draws()
    assert alone.count("RandomProblem(") == 300
    assert draws("dashcupy.cli", "dashcupy.check.command", "schedule_grid") == alone


@pytest.mark.parametrize("factor, is_right", [(1.0, True), (100.0, False)])
def test_gradients_of_a_single_key(factor, is_right):
    # dq and dk are exactly 0: the yardstick may be so too, by an algorithm of its sums that cancels
    # exactly, and a right kernel still errs by the float32 sums of dout v^T and of delta.
    torch = pytest.importorskip("torch")
    from gpu import truth
    generator = torch.Generator().manual_seed(0)

    def randn(length, scale):
        return (scale * torch.randn(16, length, 3, 128, generator=generator)).bfloat16()

    q, k, v, dout = randn(5, 3.0), randn(1, 3.0), randn(1, 3.0), randn(5, 1.0)
    exact = truth.attention(q, k, v, dout, "full")
    assert float(exact["dq"].abs().max()) < 1e-12
    yardstick = {name: x.bfloat16() for name, x in exact.items()}
    # Sums that are cut off after each 16 columns, as tensor cores do, and the row sum.
    terms = (dout.float() * v.float()).unflatten(-1, (8, 16)).double()
    total = torch.zeros(terms.shape[:-2], dtype=torch.float64)
    for step in range(8):
        total += terms[..., step, :].sum(-1)
        unit = 2.0 ** (total.abs().log2().floor() - 23)
        total = (total / unit).trunc() * unit
    ds = factor * (total - (dout.double() * v.double()).sum(-1))[..., None]
    scale = 128 ** -0.5
    got = {"dq": ds * k.double() * scale, "dk": (ds * q.double()).sum(1, keepdim=True) * scale}
    got = {name: x.bfloat16() for name, x in got.items()}
    assert float(got["dq"].abs().max()) > truth.FLOOR  # the floor alone does not say that
    assert (truth.faults(got, exact, yardstick) == []) == is_right
