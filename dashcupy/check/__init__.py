"""``python -m dashcupy check``: right values and unchanging bits, on this machine."""

from .command import add_parser

__all__ = ["add_parser"]
