"""Tables and pictures of the results, written from the records: ``python -m bench.show --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dashcupy.errors import InvalidInputError

from . import harness, model, paper, plots, records, tables, training

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
TRAINING = "<!-- training:begin -->", "<!-- training:end -->"
PICTURES = "plots"  # folder beside the results


def short(found: Sequence[Mapping], results: Path, readme: Path) -> str:
    """What the README shows: some lengths, pictures, and where all cells stand."""
    directions = sorted({r["direction"] for r in found})
    parts = [tables.caption("Measured", tables.standard(found) or found),
             "TFLOP/s of dashcupy by length; in brackets how many times as fast it is as the "
             f"fastest other kernel of the same run ({', '.join(tables.families(found))}: "
             "deterministic or not) and, backward, as the fastest deterministic one:",
             tables.compact(found), tables.standing(found), tables.price_line(found)]
    parts += [f"![{direction}: TFLOP/s over length]"
              f"({_link(picture_of(results, direction), readme)})" for direction in directions]
    here = _link(page_of(results), readme)
    parts.append(f"All cells, schedules and the DASH paper's experiment: [{here}]({here}).")
    return "\n\n".join(part for part in parts if part)


def short_training(made: Mapping, results: Path, readme: Path) -> str:
    """What the README shows of the training runs."""
    return "\n\n".join([
        training.short(made), f"![Losses of these runs, and how far apart they are]"
                              f"({_link(picture_of(results, 'repro'), readme)})"])


def _link(path: Path, readme: Path) -> str:
    return path.resolve().relative_to(readme.resolve().parent).as_posix()


def picture_of(results: Path, name: str) -> Path:
    """The file of one picture of a results file."""
    return results.parent / PICTURES / f"{results.stem}_{name}.svg"


def page_of(results: Path) -> Path:
    """The file with all tables of a results file."""
    return results.with_suffix(".md")


def page(found: Sequence[Mapping], made: Mapping | None, trained: Mapping | None,
         results: Path) -> str:
    """All tables, with the pictures; the text between the markers of `page_of`."""
    pictures = {name: f"![{name}]({PICTURES}/{picture_of(results, name).name})"
                for name in (*sorted({r["direction"] for r in found}), "price", "simulated",
                             "paper", "repro")}
    parts = ["## All cells", *(pictures[name] for name in sorted({r["direction"] for r in found})),
             tables.full(found)]
    if tables.price_rows(found):
        parts += ["## Price of determinism", pictures["price"], tables.price(found)]
    if made and made["predictions"]:
        parts += ["## Measured against simulated",
                  "Cells: measured / predicted, ms; `!` where they differ by more than "
                  f"{model.WRONG:.0%}.", pictures["simulated"], tables.predictions(made)]
    if any(row.ours for row in paper.rows(found, made)):
        parts += ["## The DASH paper's experiment", pictures["paper"], paper.text(found, made)]
    if trained:
        parts += ["## Training runs", pictures["repro"], training.table(trained)]
    return "\n\n".join(part for part in parts if part)


def insert(text: str, part: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """Text with what stands between the markers replaced.

    Raises
    ------
    InvalidInputError
        The markers are missing or in the wrong order.
    """
    begin, end = map(text.find, markers)
    if not 0 <= begin < end:
        raise InvalidInputError(f"the text needs a line {markers[0]} and, below it, a line "
                                f"{markers[1]}")
    return f"{text[:begin]}{markers[0]}\n{part}\n{text[end:]}"


def files(results: Path, readme: Path) -> dict[Path, str]:
    """What `write` puts where, pictures left out: text by file.

    Raises
    ------
    InvalidInputError
        Markers are missing, or the records are of several cards.
    """
    found = records.read(results)
    records.device_of(found)
    made, trained = current_model(results, found), training.read(results)
    target = page_of(results)
    old = target.read_text(encoding="utf-8") if target.is_file() else f"{BEGIN}\n{END}\n"
    text = insert(readme.read_text(encoding="utf-8"), short(found, results, readme))
    if trained:
        text = insert(text, short_training(trained, results, readme), TRAINING)
    return {readme: text, target: insert(old, page(found, made, trained, results))}


def current_model(results: Path, found: Sequence[Mapping]) -> Mapping | None:
    """The model beside the results, if it was made from these times."""
    made = model.read(results)
    return made if made and model.is_of(made, found) else None


def write(results: Path, readme: Path) -> list[Path]:
    """Write tables and pictures of a results file; returns what was written."""
    texts = files(results, readme)
    found = records.read(results)
    made = current_model(results, found)
    drawn = plots.draw_all(found, made, paper.rows(found, made), results.parent / PICTURES,
                           results.stem)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return [*texts, *drawn]


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dashcupy bench show",
        description="Print the tables of a results file, or write them and the pictures.")
    parser.add_argument("--results", type=Path, default=records.RESULTS, metavar="FILE",
                        help="records to show (default: bench/results/h200.json)")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE",
                        help="merge these files into the results first")
    parser.add_argument("--write", type=Path, nargs="?", const=README, metavar="README",
                        help=f"replace what stands between {BEGIN} and {END} there and in the .md "
                             f"beside the results (and between {' and '.join(TRAINING)} there), "
                             f"and draw the pictures")
    options = parser.parse_args(arguments)
    if options.write and not options.write.is_file():
        parser.error(f"{options.write} does not exist")
    for path in options.merge:
        if not path.is_file():
            parser.error(f"{path} does not exist")
        records.write(options.results, records.read(path))
    found = records.read(options.results)
    if not found:
        print(f"no records in {options.results}", file=sys.stderr)
        return 1
    if options.write:
        for path in write(options.results, options.write):
            print(f"wrote {path}", file=sys.stderr)
    print(page(found, current_model(options.results, found), training.read(options.results),
               options.results))
    return 0


if __name__ == "__main__":
    harness.script(main)
