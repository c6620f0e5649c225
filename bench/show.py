"""The speed tables of the README, written from the results: ``python -m bench.show --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench import records

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"

# Column of a table -> what its record says; the forward has no schedule and no fa2_det.
_OURS = {"peer": "dashcupy"}
_PEERS = {
    "forward": {"FA2": {"peer": "fa2"}, "cuDNN": {"peer": "cudnn"}},
    "backward": {"FA2, deterministic": {"peer": "fa2_det"}, "FA2": {"peer": "fa2"},
                 "cuDNN": {"peer": "cudnn"}},
}


def tables(found: Iterable[Mapping]) -> str:
    """Markdown of all records: a table for each card and direction; empty if there are none.

    A row is a cell; times are medians in ms, with TFLOP/s for ours. ``auto`` stands for ours in the
    backward; where only named schedules were measured, the fastest of them.
    """
    found = list(found)
    parts = []
    for device in sorted({r["device"] for r in found}):
        for direction in ("backward", "forward"):
            mine = [r for r in found if (r["device"], r["direction"]) == (device, direction)]
            if mine:
                parts.append(_table(device, direction, mine))
    return "\n\n".join(parts)


def _table(device: str, direction: str, found: list[Mapping]) -> str:
    columns = _PEERS[direction]
    backward = direction == "backward"
    head = ["head_dim", "mask", "len", "dashcupy, ms (TFLOP/s)", *(["schedule"] * backward),
            *(f"{name}, ms" for name in columns), f"{next(iter(columns))} / dashcupy"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in sorted({_cell(r) for r in found}):
        of_cell = [r for r in found if _cell(r) == cell]
        ours = _ours(of_cell)
        peers = [next((r for r in of_cell if _matches(r, want)), None)
                 for want in columns.values()]
        first = peers[0]
        line = [str(cell[0]), "full" if cell[1] else "causal", str(cell[2]),
                f"{ours['ms']:.3f} ({ours['tflops']:.0f})" if ours else "-"]
        if backward:
            line.append(f"`{ours['schedule_used']}`" if ours else "-")
        line += [f"{r['ms']:.3f}" if r else "-" for r in peers]
        line.append(f"{first['ms'] / ours['ms']:.2f}" if ours and first else "-")
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join([_caption(device, direction, found), "", *lines])


def _caption(device: str, direction: str, found: list[Mapping]) -> str:
    newest = max(found, key=lambda r: r["date"])
    versions = newest["versions"]
    ours = [r for r in found if r["peer"] == "dashcupy"]
    bits = "equal bits in every repeat" if all(r["same_bits"] for r in ours) else \
        "NOT equal bits in every repeat"
    tokens = {r["batch"] * r["seqlen"] for r in found}
    dtype = ", ".join(sorted({r["dtype"] for r in found}))
    return (f"**{direction.capitalize()}** on {device}, {dtype}, "
            f"{', '.join(f'{n:,}' for n in sorted(tokens))} tokens in all, dashcupy: {bits}. "
            f"Driver {newest['driver']}, CUDA {newest['cuda']}, "
            f"torch {versions.get('torch', 'unknown')}, cuDNN {versions.get('cudnn', 'unknown')}, "
            f"{newest['date']}.")


def _cell(r: Mapping) -> tuple:
    # Causal first, as in the list of cells.
    return r["head_dim"], not r["causal"], r["seqlen"], r["q_heads"], r["kv_heads"]


def _matches(r: Mapping, want: Mapping) -> bool:
    return all(r[name] == value for name, value in want.items())


def _ours(of_cell: list[Mapping]) -> Mapping | None:
    mine = [r for r in of_cell if _matches(r, _OURS)]
    auto = [r for r in mine if r["schedule"] in (None, "auto")]
    return min(auto or mine, key=lambda r: r["ms"], default=None)


def insert(text: str, table: str) -> str:
    """Text with the part between the markers replaced.

    Raises
    ------
    ValueError
        The markers are missing or in the wrong order.
    """
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"the text needs a line {BEGIN} and, below it, a line {END}")
    return f"{text[:begin]}{BEGIN}\n{table}\n{text[end:]}"


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.show", description="Print the speed tables, or put them in a README.")
    parser.add_argument("--results", type=Path, default=records.RESULTS, metavar="FILE",
                        help="records to show (default: bench/results/h200.json)")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE",
                        help="merge these files into the results first")
    parser.add_argument("--write", type=Path, nargs="?", const=README, metavar="README",
                        help=f"replace what stands between {BEGIN} and {END}")
    options = parser.parse_args(arguments)
    for path in options.merge:
        if not path.is_file():
            parser.error(f"{path} does not exist")
        records.write(options.results, records.read(path))
    table = tables(records.read(options.results))
    if not table:
        print(f"no records in {options.results}", file=sys.stderr)
        return 1
    print(table)
    if options.write:
        old = options.write.read_text(encoding="utf-8")
        options.write.write_text(insert(old, table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
