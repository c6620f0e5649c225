"""The wheel works far from the checkout: kernels come along, nothing else is needed.

Guards against a wheel without ``cuda_src``, and against code that only finds files beside itself
in a checkout.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

USE = """
import numpy as np, dashcupy
from dashcupy import source
q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 40, 2, 16))
out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
dq, dk, dv = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=True)
assert np.array_equal(out[:, 0], v[:, 0]), "row 0 sees key 0 alone"
assert np.allclose(dv.sum(1), dout.sum(1)), "the weights of every row sum to 1"
text = source.expand("bwd_sm80", {"DC_SCHEDULE": "schedules/shift.cuh"})
assert 'extern "C"' in text and "namespace schedule" in text and "#include" not in text
print(dashcupy.__file__)
print(source.cuda_root())
"""


def _run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    found, = folder.glob("dashcupy-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> tuple[Path, Path]:
    """(python, site-packages) of a fresh environment where pip has put the wheel, offline."""
    pytest.importorskip("pip")
    import ml_dtypes
    import numpy
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                     cwd=folder).strip())
    _run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check",
         "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    # The dependencies are borrowed; .pth files in their folder, such as that of an editable
    # dashcupy, are not followed from here.
    borrowed = {str(Path(module.__file__).parent.parent) for module in (numpy, ml_dtypes)}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return python, site


def test_wheel_holds_all_sources_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata, = (name for name in archive.namelist() if name.endswith("/METADATA"))
        summary, = (line for line in archive.read(metadata).decode().splitlines()
                    if line.startswith("Summary:"))
        assert summary.endswith("a bit, for NumPy, CuPy and anything that speaks DLPack")
        licence, = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "dashcupy").rglob("*.py")}
    cuda = {f"dashcupy/{path.relative_to(ROOT)}" for path in (ROOT / "cuda_src").rglob("*")
            if path.is_file()}
    assert any(name.endswith("bwd_sm80.cu") for name in cuda)
    bench = {f"dashcupy/{path.relative_to(ROOT)}" for path in (ROOT / "bench").rglob("*.py")}
    assert names == python | cuda | bench


def test_installed_wheel_computes_and_expands_its_own_kernels(installed, tmp_path):
    python, site = installed
    where, cuda_root = _run(python, "-c", USE, cwd=tmp_path).split()
    assert Path(where) == site / "dashcupy" / "__init__.py"
    assert Path(cuda_root) == site / "dashcupy" / "cuda_src"


def test_installed_wheel_has_its_version_and_command_line(installed, tmp_path):
    from dashcupy import __version__
    python, _ = installed
    report = _run(python, "-m", "dashcupy", "info", cwd=tmp_path)
    line, = (line for line in report.splitlines() if line.split()[:1] == ["dashcupy"])
    assert line.split()[1] == __version__
    command = python.with_name("dashcupy")
    assert "shift" in _run(command, "schedule", "shift", "--kv", "4", cwd=tmp_path)
    assert "ours / plain" in _run(command, "bench", "cpu", "--length", "64", "--rounds", "1",
                                  cwd=tmp_path)


def test_measurements_of_a_wheel_name_the_code_as_those_of_a_checkout_do(installed, tmp_path):
    """The wheel holds the bench inside the package; its files would make another digest."""
    from dashcupy.source import source_digest
    python, _ = installed
    found = _run(python, "-c", "from dashcupy import source; print(source.source_digest())",
                 cwd=tmp_path)
    assert found.strip() == source_digest()
