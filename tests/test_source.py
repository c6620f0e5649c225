"""The expansion of a kernel into one string, and what it refuses."""

import re

import numpy as np
import pytest

from dashcupy import source
from dashcupy.errors import CompileError, InvalidInputError


@pytest.fixture
def tree(tmp_path):
    """Write files into a folder of CUDA sources: ``tree({"a.cu": "..."})``."""
    root = tmp_path / "cuda_src"

    def write(files):
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root
    return write


def test_config_then_every_file_once(tree):
    """Two paths to one header (a diamond, a cycle) must not define things twice."""
    root = tree({
        "k.cu": '#include "left.cuh"\n#include "ptx/../right.cuh"\n#include "right.cuh"\nint k;\n',
        "left.cuh": '#pragma once\n#include "base.cuh"\nint left;\n',
        "right.cuh": '#include "base.cuh"\n#include "left.cuh"\nint right;\n',
        "base.cuh": "#pragma once\nint base;",
        "ptx/x.cuh": "",
    })
    text = source.expand("k", {"DC_B": 2, "DC_A": 1}, root)
    assert text == "\n".join([
        '#line 1 "config"', "#define DC_A 1", "#define DC_B 2",
        '#line 1 "k.cu"',
        '#line 1 "left.cuh"', "",
        '#line 1 "base.cuh"', "", "int base;",
        '#line 3 "left.cuh"', "int left;", "",
        '#line 2 "k.cu"',
        '#line 1 "right.cuh"', '#line 2 "right.cuh"', '#line 3 "right.cuh"', "int right;", "",
        '#line 3 "k.cu"', '#line 4 "k.cu"', "int k;", "", ""])


def test_include_by_define(tree):
    root = tree({"k.cu": "  #  include DC_SCHEDULE  // the order\nint k;\n",
                 "schedules/shift.cuh": "int shift;\n"})
    text = source.expand("k", {"DC_SCHEDULE": "schedules/shift.cuh"}, root)
    assert '#define DC_SCHEDULE "schedules/shift.cuh"' in text
    assert text.index("int shift;") < text.index("int k;")


def test_includes_in_comments_and_strings_are_left_alone(tree):
    body = ('// #include "none.cuh"\n/*\n#include <stdio.h>\n*/ int a;\n'
            'char q = \'"\'; // "\nconst char* s = "/*";\n#if 1\n// #include "none.cuh"\n#endif\n'
            'const char* raw = R"(\n#include "none.cuh"\n)";\n#include "b.cuh" /* why */\n')
    root = tree({"k.cu": body, "b.cuh": "int b;"})
    text = source.expand("k", {}, root)
    assert text == ('#line 1 "config"\n#line 1 "k.cu"\n'
                    + body.replace('#include "b.cuh" /* why */\n',
                                   '#line 1 "b.cuh"\nint b;\n#line 14 "k.cu"\n\n'))


@pytest.mark.parametrize("line, says", [
    ("#include <cuda_bf16.h>", "no system header"),
    ('#import "b.cuh"', "only #include"),
    ('#include_next "b.cuh"', "only #include"),
    ("#include OTHER", "only #include"),
    ("#include", "only #include"),
    ('#include "none.cuh"', "no such file"),
    ('#include "../outside.cuh"', "leaves cuda_src/"),
    ('#include "/etc/hosts"', "leaves cuda_src/"),
    ("#include DC_NUMBER", "must set DC_NUMBER to a file name, got 3"),
    ("#include DC_UNSET", "must set DC_UNSET to a file name, got None"),
    ("#include DC_LOST", "DC_LOST ('lost.cuh'): no such file"),
    ('#if DC_NUMBER\n#include "b.cuh"\n#endif', "inside #if"),
])
def test_refused_includes_name_file_and_line(tree, line, says):
    """A silent miss would surface as a riddle from the compiler, or not at all (a cache key
    that does not see the file)."""
    at = 2 + line.startswith("#if")
    root = tree({"k.cu": '#include "sub/a.cuh"\n', "sub/a.cuh": f"int a;\n{line}\n", "b.cuh": ""})
    (root.parent / "outside.cuh").write_text("")
    with pytest.raises(CompileError, match=re.escape(says)) as error:
        source.expand("k", {"DC_NUMBER": 3, "DC_LOST": "lost.cuh"}, root)
    assert str(error.value).startswith(f"sub/a.cuh({at}): ")


def test_unknown_kernel_lists_the_known(tree):
    root = tree({"bwd.cu": "", "fwd.cu": "", "x.cuh": ""})
    with pytest.raises(CompileError, match=r"no kernel 'foo'.*\(known: bwd, fwd\)"):
        source.expand("foo", {}, root)


def test_config_values(tree):
    block = source.config_block({"DC_T": True, "DC_N": np.int64(-4), "DC_S": "a/b.cuh"})
    assert block == ["#define DC_N -4", '#define DC_S "a/b.cuh"', "#define DC_T 1"]


@pytest.mark.parametrize("name, value", [
    ("Q_TILE", 1), ("DC_x", 1), ("DC_A B", 1), ("DC_SCALE", 0.5), ("DC_NONE", None),
    ("DC_SCHEDULE", '"schedules/shift.cuh"'), ("DC_S", "a\nb"),
])
def test_refused_config(name, value):
    with pytest.raises(InvalidInputError, match="define"):
        source.config_block({name: value})


def test_sources_are_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch):
    """An installed package must use its own copy, whatever lies beside it."""
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "dashcupy")
    with pytest.raises(CompileError, match="install dashcupy again"):
        source.cuda_root()
    (tmp_path / "cuda_src").mkdir()
    assert source.cuda_root() == tmp_path / "cuda_src"
    (tmp_path / "dashcupy" / "cuda_src").mkdir(parents=True)
    assert source.cuda_root() == tmp_path / "dashcupy" / "cuda_src"


def test_digest_sees_code_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "dashcupy")
    files = {"dashcupy/a.py": "a", "cuda_src/k.cu": "k", "cuda_src/ptx/m.cuh": "m"}

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, text in files.items():
        write(name, text)
    digest = source.source_digest()
    write("cuda_src/README.md", "prose")
    write("dashcupy/__pycache__/a.pyc", "x")
    assert source.source_digest() == digest
    for name, text in files.items():
        write(name, text + " ")
        assert source.source_digest() != digest, name
        write(name, text)
    (tmp_path / "cuda_src/k.cu").rename(tmp_path / "cuda_src/l.cu")
    assert source.source_digest() != digest


def test_no_line_of_the_kernels_is_longer_than_100_columns():
    """The linter looks at Python alone."""
    long = [f"{path.name}:{number}" for path in sorted(source.cuda_root().rglob("*.cu*"))
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert not long
