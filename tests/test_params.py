"""The parameter structs in Python against the ones that a C++ compiler sees in params.cuh."""

import shutil
import struct
import subprocess

import pytest

from dashcupy import params, source

STRUCT_NAME = {"forward": "ForwardParams", "backward": "BackwardParams"}
COMPILER = shutil.which("g++") or shutil.which("clang++")
PROGRAM = r"""
#include <cstddef>
#include <cstdio>
static inline float __uint_as_float(unsigned) { return 0; }
#include "params.cuh"
int main() {
%s
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_offsets_are_the_compilers(direction, tmp_path):
    """A field that moved shifts all behind it: strides would be read as sizes."""
    name = STRUCT_NAME[direction]
    lines = [f'  std::printf("{field} %zu\\n", offsetof({name}, {field}));'
             for field, _ in params.FIELDS[direction]]
    lines.append(f'  std::printf("sizeof %zu\\n", sizeof({name}));')
    (tmp_path / "offsets.cpp").write_text(PROGRAM % "\n".join(lines))
    program = tmp_path / "offsets"
    subprocess.run([COMPILER, "-std=c++17", "-w", f"-I{source.cuda_root()}", "-DDC_BF16=1",
                    f"-DDC_PARAMS_BYTES={params.n_bytes(direction)}", "-o", program,
                    tmp_path / "offsets.cpp"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    compiled = {key: int(value) for key, value in map(str.split, printed.splitlines())}
    assert compiled.pop("sizeof") == params.n_bytes(direction)
    assert compiled == params.offsets(direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_value_lands_in_its_field(direction):
    """Packing by position would swap two strides without a word."""
    values = {name: index + (0.5 if code == "f" else 0)
              for index, (name, code) in enumerate(params.FIELDS[direction], 1)}
    packed = params.pack(direction, values)
    for name, code in params.FIELDS[direction]:
        found, = struct.unpack_from("@" + code, packed, params.offsets(direction)[name])
        assert found == values[name], name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_pointers_come_first(direction):
    """A launch fills in the pointers as one run at the start."""
    codes = "".join(code for _, code in params.FIELDS[direction])
    n_pointer = len(params.ARRAYS[direction]) + len(params.WORKSPACE[direction])
    assert codes.startswith("P" * n_pointer) and codes.count("P") == n_pointer
    assert params.pointer_packer(direction).size == 8 * n_pointer
