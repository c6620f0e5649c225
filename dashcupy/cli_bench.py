"""``python -m dashcupy bench``: the measurements of ``bench/``, from a checkout or a wheel."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from .errors import UnsupportedError
from .source import PACKAGE

SCRIPTS = ("forward", "backward", "schedules", "paper", "overhead", "cpu", "train_repro",
           "show")
_NAME = f"{__package__}.bench"

DESCRIPTION = """\
Time the kernels on this GPU beside other packages' (forward, backward), every schedule beside the
simulator (schedules), repeat the experiment of the DASH paper (paper), time what a call costs the
host (overhead), time the NumPy backend (cpu), train a model and compare runs to the bit
(train_repro), show results (show). `bench SCRIPT --help` lists the options of a script.
"""


def add_parser(commands) -> None:
    """Add the command ``bench`` to the subparsers of a command line."""
    parser = commands.add_parser("bench", help="time kernels, peers and schedules",
                                 description=DESCRIPTION)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...",
                        help="options of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the script's exit status."""
    _require_package()
    return importlib.import_module(f"{_NAME}.{args.script}").main(args.arguments) or 0


def _require_package() -> None:
    """Make ``dashcupy.bench`` importable: a wheel has it, in a checkout it lies beside the package.

    By its path, so that a folder ``bench`` of the user's is not taken for it.

    Raises
    ------
    UnsupportedError
        It is in neither place.
    """
    if _NAME in sys.modules or importlib.util.find_spec(_NAME):
        return
    folder = PACKAGE.parent / "bench"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if not (folder / "records.py").is_file():
        raise UnsupportedError(f"the measurements are missing: neither {PACKAGE / 'bench'} nor "
                               f"{folder} holds them; install dashcupy again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
