"""The parameter structs in Python against the ones that a C++ compiler sees in params*.cuh."""

import shutil
import struct
import subprocess

import pytest

from dashcupy import params, source

STRUCT_NAME = {"forward": "ForwardParams", "backward": "BackwardParams",
               "forward_sm90": "ForwardSm90Params", "backward_maps": "BackwardMaps",
               "copy": "CopyParams"}
COMPILER = shutil.which("g++") or shutil.which("clang++")
PROGRAM = r"""
#include <cstddef>
#include <cstdio>
static inline float __uint_as_float(unsigned) { return 0; }
#include "%s"
int main() {
%s
}
"""


KINDS = list(params.FIELDS)
HEADERS = {"forward_sm90": "params_sm90.cuh", "backward_maps": "params_bwd_sm90.cuh"}


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_the_compilers(kind, tmp_path):
    """A field that moved shifts all behind it: strides would be read as sizes."""
    name = STRUCT_NAME[kind]
    header = HEADERS.get(kind, "params.cuh")
    lines = [f'  std::printf("{field} %zu\\n", offsetof({name}, {field}));'
             for field, _ in params.FIELDS[kind]]
    lines.append(f'  std::printf("sizeof %zu\\n", sizeof({name}));')
    (tmp_path / "offsets.cpp").write_text(PROGRAM % (header, "\n".join(lines)))
    program = tmp_path / "offsets"
    subprocess.run([COMPILER, "-std=c++17", "-w", f"-I{source.cuda_root()}", "-DDC_BF16=1",
                    f"-DDC_PARAMS_BYTES={params.n_bytes(kind)}", "-o", program,
                    tmp_path / "offsets.cpp"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    compiled = {key: int(value) for key, value in map(str.split, printed.splitlines())}
    assert compiled.pop("sizeof") == params.n_bytes(kind)
    assert compiled == params.offsets(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_lands_in_its_field(kind):
    """Packing by position would swap two strides without a word."""
    values = {name: bytes([index]) * 128 if code == "128s" else index + (0.5 if code == "f" else 0)
              for index, (name, code) in enumerate(params.FIELDS[kind], 1)}
    packed = params.pack(kind, values)
    for name, code in params.FIELDS[kind]:
        found, = struct.unpack_from("@" + code, packed, params.offsets(kind)[name])
        assert found == values[name], name


@pytest.mark.parametrize("kind", KINDS)
def test_pointers_follow_one_another(kind):
    """A launch fills them in as one run, at the start or behind the tensor maps."""
    codes = [code for _, code in params.FIELDS[kind]]
    n_map, n_pointer = codes.count("128s"), codes.count("P")
    assert codes[:n_map + n_pointer] == ["128s"] * n_map + ["P"] * n_pointer
    assert params.leading(kind).size == 128 * n_map + 8 * n_pointer
    if kind in params.ARRAYS:
        given = params.ARRAYS[kind] + (params.WORKSPACE[kind] if kind == "backward" else ())
        assert tuple(name for name, code in params.FIELDS[kind] if code == "P") == given


def test_tensor_maps_lie_at_multiples_of_64_bytes():
    """The hardware faults on a map elsewhere; parameters start at a multiple of 64."""
    offsets = params.offsets("forward_sm90")
    assert [offsets[f"{name}_map"] for name in ("q", "k", "v", "out")] == [0, 128, 256, 384]
    assert params.n_bytes("forward_sm90") % 64 == 0
