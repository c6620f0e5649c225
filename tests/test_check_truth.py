"""Bounds of the check: right results of any kernel are within them, wrong ones are not."""

import numpy as np
import pytest

from dashcupy.check import inputs, truth
from dashcupy.problem import Problem
from dashcupy.reference import attention_backward_reference


def _cut_off(sums):
    """Sums in float32 as tensor cores leave them: what does not fit is cut off."""
    ulp = 2.0 ** (np.floor(np.log2(np.abs(sums))) - 23)
    return np.trunc(sums / ulp) * ulp


def test_tensor_cores_are_no_fault():
    """Sums of scores near -1400 that are cut off after every 16 columns, always downwards: an H200
    was told that its lse was wrong. An error ten times as large still is one."""
    problem = Problem(1, 64, 512, 1, 1, 128, "bfloat16", "full", 128 ** -0.5)
    made = inputs.make_inputs("deep", problem)
    q, k = (made[name][0, :, 0].astype(float) for name in "qk")
    scores = np.zeros((64, 512))
    for column in range(0, 128, 16):
        scores = _cut_off(scores + q[:, column:column + 16] @ k[:, column:column + 16].T)
    scores *= problem.scale
    top = scores.max(axis=1)
    lse = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    compare = truth.Truth(problem, made).compare
    exact = compare("lse", lse[None, None])[0]
    assert exact.ok and exact.max_error > 1e-5
    wrong = compare("lse", lse[None, None] + 1e-3)[0]
    assert not wrong.ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("kind", ["deep", "one_hot"])
def test_gradients_of_a_single_key(kind, head_dim, dtype):
    """dq and dk are exactly 0, and the plain formula may have no error at all: sums of tensor cores
    were told that they are wrong. An error of 100 roundings of such a sum still is one."""
    problem = Problem(1, 5, 1, 1, 1, head_dim, dtype, "full", head_dim ** -0.5)
    for seed in range(20):
        made = inputs.make_inputs(kind, problem, seed)
        q, k, v, dout = (made[name][0, :, 0].astype(float) for name in ("q", "k", "v", "dout"))
        terms, total = dout * v, np.zeros(5)
        for column in range(0, head_dim, 16):
            total = _cut_off(total + terms[:, column:column + 16].sum(axis=1))
        errors = {True: total - terms.sum(axis=1), False: 100 * 2.0**-23 * abs(terms).sum(axis=1)}
        compare = truth.Truth(problem, made).compare
        for is_right, error in errors.items():
            ds = error[:, None] * problem.scale
            for name, x in (("dq", ds * k), ("dk", ds.T @ q)):
                report, _ = compare(name, x.astype(made["q"].dtype)[None, :, None])
                assert report.ok == is_right, f"{name}: {report}"


def test_gradients_of_a_tiny_scale_are_judged():
    """They are as small as the scale: an error of 2**-18 would be allowed to all of them."""
    problem = Problem(1, 40, 40, 1, 1, 16, "float32", "full", 1e-9)
    made = inputs.make_inputs("normal", problem)
    compare = truth.Truth(problem, made).compare
    exact = attention_backward_reference(*(made[x] for x in ("dout", "q", "k", "v")), scale=1e-9)
    for name, x in zip(("dq", "dk"), exact):
        assert compare(name, x.astype(np.float32))[0].ok
        assert not compare(name, np.zeros(x.shape, np.float32))[0].ok
