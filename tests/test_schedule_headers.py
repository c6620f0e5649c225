"""CUDA schedules: the same integers as in Python, the drawing they show, NVRTC takes them."""

import argparse
import os
import re
import shlex
import shutil
import subprocess

import pytest
from schedule_grid import TILES, large_shapes, shapes

from dashcupy import cli_schedule, cubin, nvrtc, schedules
from dashcupy.source import cuda_root

COMPILER = next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))),
                None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")
N_HEAD = 13  # a third of them is more than a late chunk may take of the smallest group
HEAD_GROUPS = (1, 2, 3, N_HEAD)
ALL = (*schedules.names(), "unordered")
CASES = [(name, tiles, mask == "causal") for name in ALL
         for tiles in (*TILES, (1, 2)) for mask in schedules.get(name).MASKS]

# Every function of a schedule and of the shape, in the words of `dump_python` below.
DUMP_CPP = """
void dump(int q_len, int kv_len, int offset) {
  using namespace schedule;
  const Shape shape = make_shape(q_len, kv_len, offset);
  const int n_work = num_work(shape);
  printf("%d q tiles, %d kv tiles, %d active, %d works, team %d, chunk %d\\n", shape.n_q,
         shape.n_kv, num_active_kv_tiles(shape), n_work, team_size(shape), chunk_size(shape));
  for (int work = 0; work < n_work; ++work) {
    printf("work %d:", work);
    for (int part = 0; part < work_size(shape, work); ++part)
      printf(" %d", kv_tile(shape, work, part));
    printf("\\n");
  }
  for (int kv = 0; kv < shape.n_kv; ++kv) {
    printf("kv tile %d, first %d:", kv, first_q_tile(shape, kv));
    for (int step = 0; step < num_steps(shape, kv); ++step) {
      const int q = q_tile(shape, kv, step);
      printf(" %d.%d", q, ticket(shape, kv, q));
    }
    printf("\\n");
  }
  for (int q = 0; q < shape.n_q; ++q)
    printf("q tile %d: %d %d\\n", q, num_contributors(shape, q), num_kv_tiles(shape, q));
  for (const int head_group : HEAD_GROUPS) {
    printf("%d heads at a time:", head_group);
    for (int number = 0; number < N_HEAD * n_work; ++number) {
      const HeadWork place = decode(shape, N_HEAD, head_group, number);
      printf(" %d.%d", place.head, place.work);
    }
    printf("\\n");
  }
}
"""


def dump_python(name, shape):
    s = schedules.get(name)
    n_work = s.num_work(shape)
    yield (f"{shape.n_q} q tiles, {shape.n_kv} kv tiles, {shape.num_active_kv_tiles()} active, "
           f"{n_work} works, team {s.team_size(shape)}, chunk {s.chunk_size(shape)}")
    for work in range(n_work):
        parts = [s.kv_tile(shape, work, part) for part in range(s.work_size(shape, work))]
        yield f"work {work}:" + "".join(f" {part}" for part in parts)
    for kv in range(shape.n_kv):
        visits = [s.q_tile(shape, kv, step) for step in range(s.num_steps(shape, kv))]
        yield (f"kv tile {kv}, first {shape.first_q_tile(kv)}:"
               + "".join(f" {q}.{s.ticket(shape, kv, q)}" for q in visits))
    for q in range(shape.n_q):
        yield f"q tile {q}: {s.num_contributors(shape, q)} {shape.num_kv_tiles(q)}"
    for head_group in HEAD_GROUPS:
        taken = [schedules.decode(s, shape, N_HEAD, number, head_group)
                 for number in range(N_HEAD * n_work)]
        yield (f"{head_group} heads at a time:"
               + "".join(f" {head}.{work}" for head, work in taken))


def code_of(*files):
    """Text of sources of ``cuda_src``, without their includes."""
    text = "\n".join((cuda_root() / file).read_text() for file in files)
    return re.sub(r"^#(include|pragma once).*", "", text, flags=re.MULTILINE)


def config(tiles, causal):
    return (f"#define DC_Q_TILE {tiles[0]}\n#define DC_KV_TILE {tiles[1]}\n"
            f"#define DC_CAUSAL {int(causal)}\n")


def schedule_code(name):
    return code_of("schedules/shape.cuh", "schedules/contract.cuh", f"schedules/{name}.cuh")


def shapes_of(tiles, causal):
    return list(large_shapes(causal) if tiles == (1, 2) else shapes(*tiles, causal))


@pytest.fixture(scope="module")
def cpp_lines(tmp_path_factory):
    """The output of one program with every schedule in every tile size: {case: lines}."""
    text = [f"#include <cstdio>\n{code_of('common.cuh')}\nconstexpr int N_HEAD = {N_HEAD};\n"
            f"constexpr int HEAD_GROUPS[] = {{{', '.join(map(str, HEAD_GROUPS))}}};"]
    for number, (name, tiles, causal) in enumerate(CASES):
        text.append(f"{config(tiles, causal)}namespace case_{number} {{\n{schedule_code(name)}"
                    f"{DUMP_CPP}}}\n#undef DC_Q_TILE\n#undef DC_KV_TILE\n#undef DC_CAUSAL")
    text.append("int main() {")
    for number, (_, tiles, causal) in enumerate(CASES):
        text.append(f'puts("case {number}");')
        text += [f"case_{number}::dump({shape.q_len}, {shape.kv_len}, {shape.offset});"
                 for shape in shapes_of(tiles, causal)]
    text.append("}")
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "dump.cpp").write_text("\n".join(text))
    subprocess.run([COMPILER, "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-o", "dump",
                    "dump.cpp"], cwd=folder, check=True)
    output = subprocess.run([folder / "dump"], capture_output=True, text=True, check=True).stdout
    blocks = re.split(r"^case \d+\n", output, flags=re.MULTILINE)[1:]
    return {case: block.splitlines() for case, block in zip(CASES, blocks, strict=True)}


@needs_compiler
@pytest.mark.parametrize("name", ALL)
def test_header_equals_python(cpp_lines, name):
    """What runs must be what was proved: cell by cell, on every shape of the grid."""
    for case in CASES:
        if case[0] != name:
            continue
        lines = iter(cpp_lines[case])
        for shape in shapes_of(*case[1:]):
            for wanted in dump_python(name, shape):
                assert next(lines, "nothing more") == wanted, shape
        assert not list(lines)


@needs_compiler
@pytest.mark.parametrize("name", ALL)
def test_header_stands_alone(tmp_path, name):
    """It includes what it needs, relative to ``cuda_src``, and refuses a mask it does not know."""
    (tmp_path / "alone.cpp").write_text(f'#include "schedules/{name}.cuh"\n')
    for mask in ("full", "causal"):
        result = subprocess.run(
            [COMPILER, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
             "-DDC_Q_TILE=64", "-DDC_KV_TILE=128", f"-DDC_CAUSAL={int(mask == 'causal')}",
             "-I", str(cuda_root()), "alone.cpp"], cwd=tmp_path, capture_output=True, text=True)
        if mask in schedules.get(name).MASKS:
            assert result.returncode == 0, result.stderr
        else:
            assert f"{name} is defined for the" in result.stderr


@pytest.mark.parametrize("name", ALL)
def test_nvrtc_takes_the_header(name):
    """Device code is stricter than the host's; a stack frame would mean a call not inlined."""
    libraries = nvrtc.find_libraries()
    if not libraries:
        pytest.skip("no NVRTC here: pip install 'dashcupy[test]'")
    causal = "causal" in schedules.get(name).MASKS
    kernel = """
extern "C" __global__ void probe(int* out, int q_len, int kv_len, int offset, int n_head,
                                 int head_group) {
  const schedule::Shape shape = schedule::make_shape(q_len, kv_len, offset);
  const schedule::HeadWork place = schedule::decode(shape, n_head, head_group, blockIdx.x);
  for (int part = 0; part < schedule::work_size(shape, place.work); ++part) {
    const int kv = schedule::kv_tile(shape, place.work, part);
    for (int step = 0; step < schedule::num_steps(shape, kv); ++step) {
      const int q = schedule::q_tile(shape, kv, step);
      *out++ = schedule::ticket(shape, kv, q) + schedule::num_contributors(shape, q);
    }
  }
}
"""
    source = config((64, 128), causal) + code_of("common.cuh") + schedule_code(name) + kernel
    for library in libraries:
        compiled = nvrtc.compile_cubin(source, "sm_90a", library=library)
        assert cubin.resources(compiled.cubin)["probe"].stack_bytes == 0


@pytest.mark.parametrize("name", schedules.names())
def test_drawing_is_what_the_command_prints(name, capsys):
    """A drawing that the code has outgrown misleads worse than none."""
    parser = argparse.ArgumentParser()
    cli_schedule.add_parser(parser.add_subparsers())
    text = (cuda_root() / f"schedules/{name}.cuh").read_text()
    drawings = re.findall(r"^//   \$ python -m dashcupy (.*)\n((?://   [^$].*\n)+)", text,
                          flags=re.MULTILINE)
    assert drawings
    for command, drawing in drawings:
        args = parser.parse_args(shlex.split(command))
        assert args.name == name and args.run(args) == 0
        drawn = re.sub(r"^//   ", "", drawing, flags=re.MULTILINE)
        assert capsys.readouterr().out.startswith(drawn + "\n"), command
