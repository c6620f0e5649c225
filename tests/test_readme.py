"""README.md must stay true: its snippets run, its commands and tables match the code."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from dashcupy import env, schedules

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CHECK_COMMAND = "python -m pip install -e . && python -m dashcupy check"
TEST_COMMAND = 'python -m pip install -e ".[test]" && python -m pytest'
FRAMEWORKS = ("cupy", "torch", "jax")
ON_GPU = ("cupy", "jax")


def _snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _framework(snippet: str) -> str | None:
    return next((name for name in FRAMEWORKS if f"import {name}" in snippet), None)


def test_cpu_snippets_run_one_after_another():
    snippets = [text for text in _snippets() if _framework(text) is None]
    assert len(snippets) == 2  # the second one goes on where the first one ends
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["dk"].shape == names["k"].shape
    assert ":shortest_first:" in names["plan"].fingerprint


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ON_GPU)
def test_gpu_snippet_runs(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    _run_snippet_of(framework)


def test_jax_snippet_runs_without_a_gpu():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        _run_snippet_of("jax")


def _run_snippet_of(framework: str) -> None:
    snippet, = (text for text in _snippets() if _framework(text) == framework)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert type(names["dq"]) is type(names["q"])
    assert names["dq"].shape == names["q"].shape


@pytest.mark.parametrize("needed", ["dashcupy.torch import attention", "flash_attn_func",
                                    "transformers"])
def test_torch_snippet_runs(needed):
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    snippet, = (text for text in _snippets() if _framework(text) == "torch" and needed in text)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    learned = names["model"].parameters() if "model" in names else (names[x] for x in "qkv")
    assert all(bool(x.grad.isfinite().all()) for x in learned)


def test_commands_stand_in_the_readme_and_ci_runs_the_same_tests():
    lines = [line.strip() for line in README.splitlines()]
    assert CHECK_COMMAND in lines
    assert TEST_COMMAND in lines
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == TEST_COMMAND


def test_every_schedule_has_a_row_with_its_masks():
    rows = dict(re.findall(r"^\| `(\w+)` \| (any|full|causal) \|", README, re.MULTILINE))
    masks = {name: "any" if len(schedules.get(name).MASKS) == 2 else schedules.get(name).MASKS[0]
             for name in schedules.names()}
    assert rows == {"auto": "any", **masks}


def _auto_by_the_readme(cell: str, sizes: list[range], shape: schedules.Shape) -> str:
    """What a cell of the table, and the note below it with its sizes, say of a shape."""
    count = shape.num_active_kv_tiles()
    together = -(-count // 2) if shape.causal else count
    together = -(-together // 2) if together > 64 else together  # 65 to 128
    fits = any(together in size for size in sizes) and together <= -(-shape.n_q // 2)
    usual, *others = re.split(r"[;,] ", cell)
    for other in others:
        name, first, last, star = re.fullmatch(
            r"(?:else )?`(\w+)` for (\d+) to (\d+)(?: active kv tiles)?( \\\*)?", other).groups()
        if int(first) <= count <= int(last) and (fits or not star):
            return name
    return usual.strip("`")


def test_auto_table_is_what_auto_picks():
    """A table of one kernel was taken for that of all; of few q tiles one row said nothing."""
    rows = re.findall(r"^\| (?:Hopper, head_dim|any other) .*?" + r" \| (.*)" * 4 + r" \|$", README,
                      re.MULTILINE)
    note = README.split("\n\\* if ")[1].split(" are ")[1].split(", as others")[0]
    sizes = [range(int(first), int(last or first) + 1)
             for first, last in re.findall(r"(\d+)(?: to (\d+))?", note)]
    kernels = ("bwd_sm90_d64", "bwd_sm90", "bwd_sm90_d192", "bwd_sm90_d256", "bwd_sm80")
    for kernel, cells in zip(kernels, rows, strict=True):
        for causal, q_per_kv, cell in zip((False, False, True, True), (1, 4, 1, 4), cells):
            for n, n_q in itertools.product(range(1, 260), (1, 7, 30, 31, 62, 63, 520)):
                shape = schedules.Shape(n_q, 2 * n, 1, 2, causal, 2 * n - n_q)
                assert schedules.auto(shape, kernel, q_per_kv) == _auto_by_the_readme(
                    cell, sizes, shape), (kernel, q_per_kv, shape)


def test_environment_table_is_the_one_of_the_code():
    rows = re.findall(r"^\| `(DASHCUPY_\w+)` \| `?(.*?)`? \| (.*) \|$", README, re.MULTILINE)
    table = {name: (default, effect.replace("`", "")) for name, default, effect in rows}
    assert table == env.VARIABLES


def test_speed_section_keeps_its_markers():
    assert README.index("<!-- speed:begin -->") < README.index("<!-- speed:end -->")


def test_what_the_bits_depend_on_names_the_compiler():
    """The fingerprint does not name it, so the table must."""
    table = README.split("## The bit contract")[1].split("## ")[0]
    assert "the NVRTC version that compiled the kernels (major.minor)" in table


@pytest.mark.parametrize("n_tile", [1, 7, 64, 65, 127, 128, 200])
def test_residency_is_as_the_readme_says(n_tile):
    """Who reads 64 CTAs where 32 do would not try a small GPU."""
    teams = {name: schedules.get(name).team_size(schedules.Shape.from_counts(
        n_tile, n_tile, name == "symmetric_shift")) for name in ("shift", "symmetric_shift")}
    pairs = -(-n_tile // 2)
    assert teams["shift"] == n_tile if n_tile <= 64 else teams["shift"] <= 64
    assert teams["symmetric_shift"] == pairs if pairs <= 64 else teams["symmetric_shift"] <= 64
    assert "`symmetric_shift` half of its\nactive kv tiles" in README
