"""Every kernel compiles for every GPU generation, with the oldest and the newest NVRTC here.

Needs no GPU. Guards against a kernel that no longer fits its config block (sizes that Python and
C++ count apart are compared at compile time), an instruction that a generation lacks, and spills.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dashcupy import cubin, nvrtc, schedules, source
from dashcupy.config import max_head_dim
from dashcupy.plan import make_plan
from dashcupy.problem import Problem

LIBRARIES = sorted(nvrtc.find_libraries(), key=lambda library: library.version)
# (head_dim, dtype, aligned, debug)
FULL_TILES, NARROW = (128, "bfloat16", True, False), (64, "float16", True, False)
PADDED, SMALLEST = (72, "float16", False, False), (8, "bfloat16", True, False)
DEBUG = (64, "bfloat16", True, True)
# The forward of Hopper has tiles and code paths of its own for these; those beyond 128 alone.
WIDE = [(head_dim, dtype, True, False) for head_dim in (192, 256)
        for dtype in ("bfloat16", "float16")]
HOPPER = [(96, "bfloat16", True, False), (128, "float16", True, False),
          (64, "bfloat16", True, False), *WIDE]
# The backward of Hopper serves 128 alone.
HOPPER_128 = (128, "float16", False, True)
CASES = [
    *(("newest", capability, variant)
      for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
      for variant in (FULL_TILES, NARROW, PADDED)),
    ("newest", (8, 9), FULL_TILES), ("newest", (9, 0), SMALLEST), ("newest", (9, 0), DEBUG),
    *(("newest", (9, 0), variant) for variant in WIDE),
    *((which, (9, 0), HOPPER_128) for which in ("oldest", "newest")),
    *(("oldest", capability, variant)
      for capability in ((8, 0), (9, 0), (12, 0)) for variant in (FULL_TILES, PADDED)),
]
# A few registers that are kept on the stack outside the loops cost nothing to speak of; an array
# that is indexed at run time, or a tile that does not fit, takes hundreds of bytes.
MAX_STACK_BYTES = 64

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no NVRTC: pip install 'dashcupy[test]'")


def _kernels(capability, variant):
    """(kernel, defines) that the forward and the backward of both masks launch."""
    head_dim, dtype, aligned, debug = variant
    # Schedules differ in their header alone: all of them in one place is enough.
    all_schedules = capability == (9, 0) and variant is FULL_TILES
    for mask in ("full", "causal"):
        problem = Problem(1, 1000, 1000, 2, 1, head_dim, dtype, mask, 1.0)
        names = [name for name in schedules.names() if schedules.supports(name, mask)]
        plans = [make_plan(problem, "forward", capability, "auto", aligned, debug)]
        if head_dim <= max_head_dim("backward", capability):
            plans += [make_plan(problem, "backward", capability, name, aligned, debug)
                      for name in (names if all_schedules else ("auto",))]
        for plan in plans:
            yield from ((kernel.kernel, kernel.defines) for kernel in plan.kernels)


def _names(capability, variant):
    """The kernels that these plans have by design."""
    head_dim, _, aligned, _ = variant
    hopper = capability == (9, 0)
    backward = {"bwd_preprocess", "bwd_sm80"} if head_dim <= 128 else set()
    if hopper and head_dim == 128:
        backward = {"bwd_preprocess", "bwd_sm90", "bwd_postprocess"}
    copies = {"copy_rows"} if hopper and not aligned else set()
    return {"fwd_sm90" if hopper else "fwd_sm80"} | backward | copies


def _id(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("which, capability, variant", CASES, ids=_id)
def test_kernels_compile_and_do_not_spill(which, capability, variant):
    library = LIBRARIES[-1 if which == "newest" else 0]
    arch = nvrtc.choose_arch(capability, library)

    def stack_bytes(item) -> int:
        kernel, defines = item
        text = source.expand(kernel, dict(defines))
        compiled = nvrtc.compile_cubin(text, arch, library=library)
        return cubin.resources(compiled.cubin)[kernel].stack_bytes

    kernels = list(dict.fromkeys(_kernels(capability, variant)))
    assert {kernel for kernel, _ in kernels} == _names(capability, variant)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stacks = list(pool.map(stack_bytes, kernels))
    assert all(stack <= MAX_STACK_BYTES for stack in stacks), [
        (stack, *item) for stack, item in zip(stacks, kernels) if stack > MAX_STACK_BYTES]


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_the_hopper_forward_keeps_its_products_apart(library):
    """ptxas says C75xx where products no longer overlap, and a byte of stack is a role's registers
    that do not suffice: the tensor cores idle, and no result is wrong.
    """
    forwards = {item for variant in (FULL_TILES, NARROW, PADDED, SMALLEST, DEBUG, *HOPPER)
                for item in _kernels((9, 0), variant) if item[0] == "fwd_sm90"}
    assert len(forwards) > 20

    def build(item):
        kernel, defines = item
        compiled = nvrtc.compile_cubin(source.expand(kernel, dict(defines)), "sm_90a",
                                       library=library)
        return compiled.log, cubin.resources(compiled.cubin)[kernel].stack_bytes

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [(log, stack, item) for item, (log, stack) in zip(forwards, pool.map(
            build, forwards)) if "C75" in log or stack]
    assert not faults, faults


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_the_hopper_backward_keeps_its_products_apart(library):
    """As above; but some builds keep 8 bytes of the planner on the stack, once a work."""
    backwards = list(dict.fromkeys(
        item for variant in (FULL_TILES, (128, "float16", True, False), HOPPER_128)
        for item in _kernels((9, 0), variant) if item[0] == "bwd_sm90"))
    assert len(backwards) == 8 + 2 + 2

    def build(item):
        kernel, defines = item
        compiled = nvrtc.compile_cubin(source.expand(kernel, dict(defines)), "sm_90a",
                                       library=library)
        return compiled.log, cubin.resources(compiled.cubin)[kernel].stack_bytes

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [(log, stack, item) for item, (log, stack) in zip(backwards, pool.map(
            build, backwards)) if "C75" in log or stack > 8]
    assert not faults, faults


def test_every_kernel_in_the_folder_is_launched_by_some_plan():
    """A kernel that no plan names would be compiled and tested by nothing."""
    launched = {kernel for _, capability, variant in CASES
                for kernel, _ in _kernels(capability, variant)}
    assert set(source.kernel_names()) == launched
