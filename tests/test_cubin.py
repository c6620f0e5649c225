"""The ELF reader: resources of known kernels, and files that are not whole."""

import re
import sys

import pytest

from dashcupy import cubin, nvrtc
from dashcupy.errors import CompileError

KERNELS = """
extern "C" __global__ void plain(float* x, int n) { x[n] = 1.0f; }
extern "C" __global__ void shared(float* x) {
  __shared__ float rows[100];
  rows[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = rows[99 - threadIdx.x];
}
extern "C" __global__ void dynamic(float* x) {
  extern __shared__ float rows[];
  rows[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = rows[0];
}
extern "C" __global__ void indexed(float* x, int n) {
  float local[32];
  for (int i = 0; i < 32; ++i) local[i] = x[i];
  for (int i = 0; i < n; ++i) local[(i * n) & 31] += x[i];
  x[n] = local[n & 31];
}
"""
# 100 floats live at a time in 32 registers.
SPILLING = """
extern "C" __global__ void spill(float* x, int n) {
  float v[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) v[i] = x[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) x[i * n + 7] = v[i] * v[99 - i];
}
"""


def libraries():
    found = {library.version[0]: library for library in nvrtc.find_libraries()}
    return [pytest.param(library, id=f"nvrtc{major}") for major, library in sorted(found.items())]


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_resources_of_known_kernels(library, arch):
    """From sm_90 on the file counts 1 KiB of the driver's own into the shared memory: read as
    the kernel's, it would make the largest config look too large."""
    compiled = nvrtc.compile_cubin(KERNELS, arch, ("--ptxas-options=-v",), library=library)
    found = cubin.resources(compiled.cubin)
    assert sorted(found) == ["dynamic", "indexed", "plain", "shared"]
    assert {name: kernel.static_smem_bytes for name, kernel in found.items()} == {
        "dynamic": 0, "indexed": 0, "plain": 0, "shared": 400}
    assert {name: kernel.param_bytes for name, kernel in found.items()} == {
        "dynamic": 8, "indexed": 12, "plain": 12, "shared": 8}
    assert {name: kernel.stack_bytes for name, kernel in found.items()} == {
        "dynamic": 0, "indexed": 128, "plain": 0, "shared": 0}
    said = dict(re.findall(r"entry function '(\w+)'(?:.|\n)*?Used (\d+) registers", compiled.log))
    assert {name: kernel.regs for name, kernel in found.items()} == {
        name: int(regs) for name, regs in said.items()}


@pytest.mark.parametrize("library", libraries())
def test_a_spill_is_seen(library):
    """A kernel that spills still works, only slowly: a test must be able to ask."""
    limit = "--maxrregcount=32"
    compiled = nvrtc.compile_cubin(SPILLING, "sm_80", (limit,), library=library)
    spill = cubin.resources(compiled.cubin)["spill"]
    assert spill.regs <= 32 and spill.stack_bytes > 0
    gates = ("--ptxas-options=--warn-on-spills", "--ptxas-options=-Werror")
    with pytest.raises(CompileError, match="[Ss]pill"):
        nvrtc.compile_cubin(SPILLING, "sm_80", (limit, *gates), library=library)
    nvrtc.compile_cubin(KERNELS, "sm_80", gates, library=library)


@pytest.mark.parametrize("library", libraries())
def test_every_shorter_file_is_incomplete(library):
    whole = nvrtc.compile_cubin(KERNELS, "sm_90a", library=library).cubin
    assert cubin.is_complete(whole)
    assert not any(cubin.is_complete(whole[:size]) for size in range(len(whole)))


def test_other_files_are_no_cubin():
    with open(sys.executable, "rb") as file:
        host = file.read()
    for other in (b"", b"text", bytes(4096), host):
        assert not cubin.is_complete(other)
    with pytest.raises(ValueError, match="not a whole cubin"):
        cubin.resources(host)
