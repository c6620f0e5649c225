"""One call from arrays to results: borrow, check, plan; `ready` launches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import arrays, cpu, driver, env, ready, schedules
from .arguments import contiguous_strides
from .arrays import CPU, Borrowed, Framework
from .config import uses_tensor_maps
from .errors import InvalidInputError
from .launch import Launcher, is_aligned, require_contiguous_rows
from .layout import Layout
from .outputs import check_outputs
from .plan import Plan, make_plan
from .problem import AXES, ROW_ARRAYS, Problem, lse_dtype, mask_from_causal, number_from_scale
from .ready import Ready

# Arguments and results in the order of the parameter structs.
INPUTS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout", "lse", "dlse")}
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
Layouts = tuple[Layout | None, ...]


def run(direction: str, inputs: tuple[Any, ...], given: tuple[Any, ...], *,
        causal: bool | str = False, scale: float | None = None, schedule: str = "auto",
        workspace: Any = None, n_wanted: int | None = None,
        max_ctas: int | None = None) -> tuple[Any, ...]:
    """Compute, and return the results in the caller's kind of array.

    Parameters
    ----------
    direction
        ``"forward"`` or ``"backward"``.
    inputs, given
        Arrays in the order of ``INPUTS``, of which dlse may be None; preallocated results, or None
        for each, in the order of ``RESULTS``.
    causal, scale, schedule, workspace
        As for the public functions.
    n_wanted
        How many of the results the caller gets; by default all.
    max_ctas
        Upper limit on the CTAs of a persistent kernel, but for one cluster; bits do not depend on
        it.
    """
    mask, scale = mask_from_causal(causal), number_from_scale(scale)
    require_name(schedule)
    n_wanted = n_wanted or len(given)
    options = (direction, mask, scale, schedule, env.debug(), max_ctas)
    framework = arrays.framework_of(inputs[0], INPUTS[direction][0])
    seen = framework.look((*inputs, *given, workspace))
    if seen is not None:
        key, pointers = (options, seen[0]), seen[1]
        known = ready.find(key, pointers)
        if known is not None:
            return tuple(driver.on_device(known.device, known.enqueue, pointers, inputs, given,
                                          workspace, n_wanted)[:n_wanted])
    framework, borrowed = _borrow_inputs(direction, inputs)
    outputs: list[Borrowed | None] = [None] * len(given)
    scratch = None
    if workspace is not None or any(x is not None for x in given):
        outputs, scratch = _borrow_given(direction, framework, inputs, borrowed, given, workspace)
    device = borrowed[0].device
    if device == CPU:
        if scratch is not None:
            _check_workspace(scratch, framework.to_numpy(scratch).strides, 0)
        results = _run_cpu(direction, framework, borrowed, outputs, options[1:4])
    else:
        new = driver.on_device(device, _prepare, framework, borrowed, outputs, scratch, options)
        if seen is not None:
            ready.remember(key, new)
        everything = (*borrowed, *outputs, scratch)
        views = [None if b is None else b.array for b in everything]
        results = driver.on_device(
            device, new.enqueue, [0 if b is None else b.pointer for b in everything],
            views[:len(inputs)], views[len(inputs):-1], views[-1], n_wanted)
    return tuple(result if x is None else x for x, result in zip(given, results[:n_wanted]))


def plan(direction: str, inputs: tuple[Any, ...], *, causal: bool | str = False,
         scale: float | None = None, schedule: str = "auto") -> Plan:
    """What `run` would do with q, k and v."""
    mask, scale = mask_from_causal(causal), number_from_scale(scale)
    require_name(schedule)
    _, borrowed = arrays.borrow_all(("q", "k", "v"), inputs)
    layouts = {name: b.layout for name, b in zip("qkv", borrowed)}
    problem = Problem.from_arrays(layouts, mask, scale)
    device = borrowed[0].device
    if device == CPU:
        return make_plan(problem, direction, CPU, schedule)
    for name, layout in layouts.items():
        require_contiguous_rows(name, layout)
    target = driver.device(device).compute_capability
    aligned = is_aligned([b.pointer for b in borrowed], layouts,
                         uses_tensor_maps(problem, direction, target))
    return make_plan(problem, direction, target, schedule, aligned, env.debug())


def require_name(schedule: Any) -> None:
    """Refuse what cannot be looked up, such as a list."""
    if not isinstance(schedule, str):
        schedules.get(schedule)  # says what is allowed


def _borrow_inputs(direction: str,
                   inputs: tuple[Any, ...]) -> tuple[Framework, list[Borrowed | None]]:
    """What `run` is given, looked at; None for a dlse that is not there."""
    names = INPUTS[direction]
    if inputs[-1] is not None or names[-1] != "dlse":
        return arrays.borrow_all(names, inputs)
    framework, borrowed = arrays.borrow_all(names[:-1], inputs[:-1])
    return framework, [*borrowed, None]


def _borrow_given(direction: str, framework: Framework, inputs: tuple[Any, ...],
                  borrowed: list[Borrowed | None], given: tuple[Any, ...], workspace: Any
                  ) -> tuple[list[Borrowed | None], Borrowed | None]:
    """Preallocated results and workspace, looked at and checked against the inputs."""
    pairs = {name: x for name, x in zip((*RESULTS[direction], "workspace"), (*given, workspace))
             if x is not None}
    # With q in front, so that a message tells which is the odd one out.
    _, found = arrays.borrow_all(("q", *pairs), (inputs[0], *pairs.values()))
    outputs = dict(zip(pairs, found[1:]))
    check_outputs(framework, outputs, {
        name: b for name, b in zip(INPUTS[direction], borrowed) if b is not None})
    return [outputs.get(name) for name in RESULTS[direction]], outputs.get("workspace")


def _run_cpu(direction: str, framework: Framework, borrowed: list[Borrowed | None],
             outputs: list[Borrowed | None], options: tuple) -> list[Any]:
    plan = _cpu_plan(direction, *options, _layouts(borrowed), _layouts(outputs))
    views = [None if b is None else framework.to_numpy(b) for b in borrowed]
    if direction == "forward":
        results = cpu.forward(*views, plan.problem, plan.config)
    else:
        q, k, v, out, dout, lse, dlse = views
        results = cpu.backward(dout, q, k, v, out, lse, plan.problem, plan.config, plan.schedule,
                               dlse)
    for output, result in zip(outputs, results):
        if output is not None:
            np.copyto(framework.to_numpy(output), result)
    return [None if output is not None else framework.from_numpy(result, borrowed[0])
            for output, result in zip(outputs, results)]


@functools.lru_cache(maxsize=1024)
def _cpu_plan(direction: str, mask: str, scale: float | None, schedule: str, layouts: Layouts,
              given: Layouts) -> Plan:
    problem = Problem.from_arrays(_by_name(direction, layouts, given), mask, scale)
    return make_plan(problem, direction, CPU, schedule)


def _prepare(framework: Framework, borrowed: list[Borrowed | None], outputs: list[Borrowed | None],
             scratch: Borrowed | None, options: tuple) -> Ready:
    """Plan and launcher of a call on the current GPU; all checks that are not done yet."""
    with driver.relaxed_capture():  # loading a kernel allocates
        launcher, wanted = _launcher(
            borrowed[0].device, _may_be_aligned(options[0], borrowed, outputs), *options,
            _layouts(borrowed), _layouts(outputs))
    if scratch is not None:
        _check_workspace(scratch, scratch.layout.strides, launcher.plan.workspace_bytes)
    return Ready(framework, launcher, wanted, borrowed, outputs, scratch)


@functools.lru_cache(maxsize=1024)
def _launcher(device: int, may_be_aligned: bool, direction: str, mask: str, scale: float | None,
              schedule: str, debug: bool, max_ctas: int | None, layouts: Layouts, given: Layouts
              ) -> tuple[Launcher, tuple[tuple[tuple[int, ...], str], ...]]:
    """A launcher, and shape and dtype of each result; all checks that need no pointer."""
    known = _by_name(direction, layouts, given)
    problem = Problem.from_arrays(known, mask, scale)
    for name, layout in known.items():
        require_contiguous_rows(name, layout)
    wanted = tuple(_result(name, problem) for name in RESULTS[direction])
    for name, (shape, dtype) in zip(RESULTS[direction], wanted):
        known.setdefault(name, Layout(shape, contiguous_strides(shape), dtype))
    target = driver.device(device).compute_capability
    aligned = may_be_aligned and is_aligned((), known,
                                            uses_tensor_maps(problem, direction, target))
    plan = make_plan(problem, direction, target, schedule, aligned, debug)
    return Launcher(plan, known, device, max_ctas), wanted


def _result(name: str, problem: Problem) -> tuple[tuple[int, ...], str]:
    shape = tuple(getattr(problem, axis) for axis in AXES[name])
    return shape, lse_dtype(problem.dtype) if name == "lse" else problem.dtype


def _layouts(borrowed: list[Borrowed | None]) -> Layouts:
    return tuple([None if b is None else b.layout for b in borrowed])


def _by_name(direction: str, layouts: Layouts, given: Layouts) -> dict[str, Layout]:
    names = (*INPUTS[direction], *RESULTS[direction])
    return {name: layout for name, layout in zip(names, (*layouts, *given)) if layout is not None}


def _may_be_aligned(direction: str, borrowed: list[Borrowed | None],
                    outputs: list[Borrowed | None]) -> bool:
    """Whether the addresses allow 16-byte access; new arrays always do."""
    bits = row_bits = 0
    for name, b in zip((*INPUTS[direction], *RESULTS[direction]), (*borrowed, *outputs)):
        if b is None:
            continue
        if name in ROW_ARRAYS:
            row_bits |= b.pointer
        else:
            bits |= b.pointer
    if bits & 1 or row_bits & 3:
        raise InvalidInputError("an array starts at an address that is no multiple of its "
                                "element's size (a view of bytes?): copy it")
    return bits & 15 == 0


def _check_workspace(scratch: Borrowed, strides: tuple[int, ...], n_bytes: int) -> None:
    shape, _, dtype = scratch.layout
    if (len(shape) != 1 or dtype != "uint8" or shape[0] < n_bytes
            or (shape[0] > 1 and strides != (1,)) or scratch.pointer % 16):
        address = "" if scratch.device == CPU else f", starting at address {scratch.pointer}"
        raise InvalidInputError(
            f"workspace has shape {tuple(shape)}, strides {strides} and dtype {dtype}{address}: "
            f"must be one contiguous axis of at least {n_bytes} uint8 at a multiple of 16 bytes")
