"""What ``schedules.py`` and ``paper.py`` share: measure or read records, and their model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from dashcupy.errors import InvalidInputError

from . import harness, model, records


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a script that can do without a GPU."""
    parser.add_argument("--no-measure", action="store_true",
                        help=f"time nothing: report what the file of --json holds (default: "
                             f"{records.RESULTS.name}); needs no GPU")
    parser.add_argument("--no-model", action="store_true",
                        help="no simulation, which takes minutes on one CPU core")


def measure_or_read(direction: harness.Direction, options: argparse.Namespace
                    ) -> tuple[list[dict], Mapping | None, bool]:
    """Records, their model (made anew if it is not of these times), and whether ours was bad.

    A model of a whole results file is written beside it.

    Raises
    ------
    InvalidInputError
        ``--no-measure`` and no records.
    """
    path = options.json or (records.RESULTS if options.no_measure else None)
    bad = False
    if options.no_measure:
        found = records.read(path)
        if not found:
            raise InvalidInputError(f"no records in {path}: measure first")
    else:
        found, bad = harness.run(direction, options)
    made = model.read(path) if path else None
    if made is None or not model.is_of(made, found):
        made = None if options.no_model else model.predict(found)
        if made and path and options.no_measure:
            model.write(path, made)
    return found, made, bad
