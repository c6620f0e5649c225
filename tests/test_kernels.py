"""Every kernel compiles for every GPU generation, with the oldest and the newest NVRTC here.

Needs no GPU. Guards against a kernel that no longer fits its config block (sizes that Python and
C++ count apart are compared at compile time), an instruction that a generation lacks, warnings of
the assembler, and spills.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dashcupy import cubin, nvrtc, schedules, source
from dashcupy.config_sm90 import BACKWARD_KERNELS
from dashcupy.plan import make_plan
from dashcupy.problem import Problem

LIBRARIES = sorted(nvrtc.find_libraries(), key=lambda library: library.version)
TARGETS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
PADS = (32, 64, 96, 128)
# (head_dim, dtype, mask, schedule, aligned, debug): on every target each padded head_dim, dtype,
# mask and schedule, and the largest tiles with most of them.
COVERING = [
    (128, "bfloat16", "full", "ascending", True, False),
    (128, "float16", "causal", "descending", True, False),
    (128, "bfloat16", "causal", "symmetric_shift", True, False),
    (96, "float16", "full", "shift", True, False),
    (64, "bfloat16", "causal", "shortest_first", True, False),
    (32, "float16", "causal", "longest_first", True, False),
    (8, "bfloat16", "full", "ascending", True, False),
    (72, "float16", "causal", "descending", False, False),
]
# Further ones, on the target whose kernels are measured.
ON_9_0 = [(64, "bfloat16", "full", "ascending", True, True),
          (128, "bfloat16", "full", "shift", True, False),
          (128, "bfloat16", "causal", "shortest_first", True, False),
          (256, "bfloat16", "causal", "descending", True, False),
          (136, "float16", "full", "shift", False, True)]
# The Hopper backwards in every form; a word in a log is C75xx: products no longer overlap. Debug
# builds alone may keep something of the planner on the stack.
BACKWARDS = [(head_dim, dtype, mask, schedule, True, False) for head_dim, dtype, mask, schedule in
             itertools.product((64, 96, 128, 192, 256), ("float16", "bfloat16"), ("full", "causal"),
                               schedules.names())
             if schedules.supports(schedule, mask)]
BACKWARDS += [(head_dim, dtype, mask, "auto", aligned, True) for head_dim, dtype, mask, aligned in
              itertools.product((64, 128), ("float16", "bfloat16"), ("full", "causal"),
                                (True, False))]
BACKWARDS += [(head_dim, dtype, mask, "auto", True, True) for head_dim, dtype, mask in
              itertools.product((192, 256), ("float16", "bfloat16"), ("full", "causal"))]
# The Hopper forward has tiles of its own for each of these head_dims, and code of its own for each
# dtype and mask.
FORWARDS = [(head_dim, dtype, mask, "auto", True, False) for head_dim, dtype, mask in
            itertools.product((64, 96, 128, 192, 256), ("float16", "bfloat16"), ("full", "causal"))]
LOAD = ("spin", ())  # no plan launches it, but `check --stress` does
PRODUCT = [(*case, True, False) for case in itertools.product(
    PADS, ("float16", "bfloat16"), ("full", "causal"), schedules.names())
    if schedules.supports(case[3], case[2])]
# A register or two kept on the stack outside the loops costs nothing to speak of; an array that is
# indexed at run time, or a tile that does not fit, takes hundreds of bytes.
MAX_STACK_BYTES = 8
# Bounded waits of a debug build, whose speed does not count, take a register or two more.
MAX_STACK_BYTES_OF_DEBUG = 16
# Where a build of the covering set does not keep to that: the largest today, to see it grow.
MAX_STACK_BYTES_ON = {(8, 0): 24, (10, 0): 16}
MAX_STACK_BYTES_OF_THE_PRODUCT = 32

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no NVRTC: pip install 'dashcupy[test]'")


def _kernels(capability, cases):
    """Every (kernel, defines) that the forwards and the backwards of these cases launch, once."""
    found = {}
    for head_dim, dtype, mask, schedule, aligned, debug in cases:
        problem = Problem(1, 1000, 1000, 2, 1, head_dim, dtype, mask, 1.0)
        plans = [make_plan(problem, "forward", capability, "auto", aligned, debug),
                 make_plan(problem, "backward", capability, schedule, aligned, debug)]
        for plan in plans:
            found |= {(kernel.kernel, kernel.defines): None for kernel in plan.kernels}
    return list(found)


def _faults(capability, library, kernels, max_stack_bytes):
    """Log and stack of every kernel that has a word in its log or too much on its stack."""
    arch = nvrtc.choose_arch(capability, library)

    def compiled(item):
        kernel, defines = item
        built = nvrtc.compile_cubin(source.expand(kernel, dict(defines)), arch, library=library)
        stack_bytes = cubin.resources(built.cubin)[kernel].stack_bytes
        is_debug = dict(defines).get("DC_DEBUG") == 1
        allowed = max(max_stack_bytes, is_debug * MAX_STACK_BYTES_OF_DEBUG)
        return stack_bytes, built.log, item, stack_bytes > allowed or bool(built.log)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(compiled, kernels))
    faults = [found for *found, is_fault in built if is_fault]
    return sorted(faults, key=lambda found: -found[0])  # the worst comes first


def _id(value):
    return ".".join(map(str, value)) if isinstance(value, tuple) else None


VERSIONS = pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
ALL_TARGETS = pytest.mark.parametrize("capability", TARGETS, ids=_id)


@VERSIONS
@ALL_TARGETS
def test_kernels_compile_without_a_word_and_do_not_spill(capability, which):
    cases = COVERING + (ON_9_0 if capability == (9, 0) else [])
    most = MAX_STACK_BYTES_ON.get(capability, MAX_STACK_BYTES)
    kernels = [*_kernels(capability, cases), LOAD]
    faults = _faults(capability, LIBRARIES[which], kernels, most)
    assert not faults, "\n".join(map(str, faults))


@VERSIONS
def test_the_hopper_forward_keeps_its_products_apart(which):
    """C75xx in the log: products no longer overlap. A byte of stack: the registers of a role do not
    suffice. Either way the tensor cores idle, and no result is wrong.
    """
    cases = FORWARDS + [(64, "bfloat16", "causal", "auto", True, True)]
    kernels = [item for item in _kernels((9, 0), cases) if item[0] == "fwd_sm90"]
    assert len(kernels) == len(cases)
    faults = _faults((9, 0), LIBRARIES[which], kernels, 0)
    assert not faults, "\n".join(map(str, faults))


@VERSIONS
def test_the_hopper_backwards_keep_their_products_apart(which):
    """As above, with what stands at BACKWARDS."""
    kernels = [item for item in _kernels((9, 0), BACKWARDS) if item[0] in BACKWARD_KERNELS]
    assert len(kernels) == len(BACKWARDS) == 5 * 2 * 9 + 2 * 8 + 8
    faults = _faults((9, 0), LIBRARIES[which], kernels, 0)
    assert not faults, "\n".join(map(str, faults))


@VERSIONS
def test_pauses_leave_the_products_apart(which):
    """With DC_DELAY the tests want the kernels as they are, warps late aside. The largest tiles,
    whose registers are the scarcest.
    """
    cases = [case for case in BACKWARDS if case[0] >= 192 and not case[5]]
    kernels = [(kernel, (*defines, ("DC_DELAY", 1))) for kernel, defines in _kernels((9, 0), cases)
               if kernel in BACKWARD_KERNELS]
    assert len(kernels) == len(cases) == 2 * 2 * 9
    faults = _faults((9, 0), LIBRARIES[which], kernels, 0)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
@VERSIONS
@ALL_TARGETS
def test_no_combination_spills(capability, which):
    faults = _faults(capability, LIBRARIES[which], _kernels(capability, PRODUCT),
                     MAX_STACK_BYTES_OF_THE_PRODUCT)
    assert not faults, "\n".join(map(str, faults))


@VERSIONS
def test_warnings_of_the_assembler_reach_the_log(which):
    """Else an empty log would prove nothing."""
    text = ('extern "C" __global__ void __launch_bounds__(1024, 8) k(float* x) '
            '{ x[threadIdx.x] = 1; }\n')
    assert "ptxas warning" in nvrtc.compile_cubin(text, "sm_80", library=LIBRARIES[which]).log


def test_the_covering_set_covers():
    """A value that no case names would be compiled by nothing but the slow test."""
    assert {32 * -(-case[0] // 32) for case in COVERING} == set(PADS)
    for i in (1, 2, 3):
        assert {case[i] for case in COVERING} == {case[i] for case in PRODUCT}


def test_every_kernel_in_the_folder_is_launched_by_some_plan():
    """A kernel that no plan names would be compiled and tested by nothing."""
    launched = {kernel for capability in TARGETS for kernel, _ in _kernels(
        capability, COVERING + (ON_9_0 if capability == (9, 0) else []))}
    assert set(source.kernel_names()) == launched | {LOAD[0]}
