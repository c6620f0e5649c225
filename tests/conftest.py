"""Shared by all tests: which are left out, skipped with a reason or recorded; a kernel cache."""

import functools
import os
import re

import gpu_report
import pytest
from hypothesis import settings

# The machine may be slow or shared: a test is judged by its values, never by its speed.
settings.register_profile("dashcupy", deadline=None)
settings.load_profile("dashcupy")


def pytest_configure(config):
    if "DASHCUPY_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        os.environ["DASHCUPY_CACHE_DIR"] = str(config.cache.mkdir("kernels"))
    if gpu_report.wanted(config):
        config.pluginmanager.register(
            gpu_report.GpuReport(gpu_report.PATH, list(config.invocation_params.args)))


@functools.cache
def _gpu() -> tuple[str, tuple[int, int]]:
    """(why there is no GPU or "", compute capability)."""
    from dashcupy import driver
    from dashcupy.errors import DashcupyError
    try:
        driver.require_cupy()
        found = driver.devices()
    except DashcupyError as error:
        return str(error), (0, 0)
    return ("", found[0].compute_capability) if found else ("the driver sees no GPU", (0, 0))


def leave_out_slow(config, items):
    """Deselect slow tests unless they were asked for: any -m replaces the one of pyproject.toml."""
    expression = config.getoption("markexpr")
    if not expression or re.search(r"\bslow\b", expression):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_collection_modifyitems(config, items):
    leave_out_slow(config, items)
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("gpu", "sm90")):
            continue
        reason, capability = _gpu()
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
        elif item.get_closest_marker("sm90") and capability != (9, 0):
            item.add_marker(pytest.mark.skip(
                reason="needs compute capability 9.0, here {}.{}".format(*capability)))
