"""The command line: ``python -m dashcupy check|info|schedule|build|bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from . import check, cli_bench, cli_build, cli_schedule, info
from .errors import DashcupyError
from .version import __version__

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status: 0 for success, 1 if a check failed, 2 for an error (one line on stderr),
        130 after Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except DashcupyError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dashcupy",
        description="Attention whose gradients never change a bit: check it on this machine, see "
                    "what it would run, draw a schedule, compile kernels ahead of time, measure "
                    "them.")
    parser.add_argument("--version", action="version", version=f"dashcupy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    check.add_parser(commands)
    _add_info(commands)
    cli_schedule.add_parser(commands)
    cli_build.add_parser(commands)
    cli_bench.add_parser(commands)
    return parser


def _add_info(commands) -> None:
    parser = commands.add_parser(
        "info", help="versions, GPUs, compilers and environment, for a bug report",
        description="Print what a bug report needs; changes nothing and starts no GPU work.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_run_info)


def _run_info(args: argparse.Namespace) -> int:
    sections = info.collect()
    print(json.dumps(sections, indent=2) if args.json else info.as_text(sections))
    return 0
