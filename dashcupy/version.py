"""The version of this package, written once: here."""

__version__ = "0.1.0"
