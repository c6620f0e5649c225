"""Every schedule in every cell beside the simulator: ``python -m bench.schedules --help``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import backward, harness, model, ours, report, tables


def text(found: Sequence[Mapping], made: Mapping | None) -> str:
    """Measured over predicted times, and what determinism costs."""
    parts = []
    if made:
        wrong = [p for p in made["predictions"] if tables.is_wrong(p)]
        parts.append(
            f"Measured / predicted, ms; {len(wrong)} of {len(made['predictions'])} differ by more "
            f"than {model.WRONG:.0%} (!).\n\n{tables.predictions(made)}")
    parts.append(tables.price(found) or (
        f"The price of determinism is not known: no time of schedule {ours.UNORDERED!r}, which "
        f"adds in any order."))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    parser = harness.parser("schedules", "Time every schedule, and compare with the simulator.",
                            schedules="all")
    report.add_options(parser)
    found, made, bad = report.measure_or_read(backward.BACKWARD, parser.parse_args(arguments))
    print(text(found, made))
    return int(bad)


if __name__ == "__main__":
    harness.script(main)
