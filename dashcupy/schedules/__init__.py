"""Registry of the tile schedules: every module of this package that defines ``NAME`` is one."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil

from ..errors import InvalidInputError, UnsupportedError
from ..problem import MASKS
from .auto import auto
from .contract import Schedule
from .order import decode, heads_in_turn, total_work
from .shape import Shape

__all__ = ["Schedule", "Shape", "auto", "decode", "get", "heads_in_turn", "names",
           "require_resident", "resolve", "supports", "total_work"]


@functools.cache
def _registry() -> dict[str, Schedule]:
    modules = (importlib.import_module(f"{__name__}.{info.name}")
               for info in pkgutil.iter_modules(__path__))
    return {module.NAME: module for module in modules if hasattr(module, "NAME")}


def names() -> tuple[str, ...]:
    """Names of the deterministic schedules, sorted; ``"auto"`` is a request and not among them."""
    return tuple(sorted(name for name, module in _registry().items() if module.DETERMINISTIC))


def get(name: str) -> Schedule:
    """The schedule of that name, ``"unordered"`` included, which is not deterministic.

    Raises
    ------
    InvalidInputError
        The name is unknown; the message lists the names and the closest one.
    """
    if isinstance(name, str) and name in _registry():
        return _registry()[name]
    close = difflib.get_close_matches(str(name), names(), n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidInputError(
        f"schedule={name!r} is not known (allowed: auto, {', '.join(names())}){hint}")


def supports(name: str, mask: str) -> bool:
    """Whether the schedule is defined for ``"full"``, ``"causal"`` or ``"causal_top_left"``."""
    if mask not in MASKS:
        raise InvalidInputError(f"mask {mask!r} is not known (allowed: {', '.join(MASKS)})")
    return mask.removesuffix("_top_left") in get(name).MASKS


def resolve(name: str, shape: Shape, kernel: str = "", q_per_kv: int = 1) -> Schedule:
    """The schedule that a request names, ``"auto"`` included, checked against the mask.

    Parameters
    ----------
    name, shape
    kernel, q_per_kv
        Which kernel runs it, and how many q heads share a kv head: ``"auto"`` depends on both.

    Raises
    ------
    InvalidInputError
        The name is unknown, or the schedule is not defined for the mask of the shape.
    """
    schedule = get(auto(shape, kernel, q_per_kv) if name == "auto" else name)
    mask = "causal" if shape.causal else "full"
    if mask not in schedule.MASKS:
        others = ", ".join(repr(other) for other in names() if supports(other, mask))
        raise InvalidInputError(
            f"schedule={name!r} is not defined for the {mask} mask (allowed: "
            f"{', '.join(schedule.MASKS)}); for {mask} use {others} or 'auto'")
    return schedule


def require_resident(name: str, shape: Shape, n_resident: int, what: str = "CTAs") -> None:
    """Refuse a schedule whose works wait for one another where too few run at the same time.

    Parameters
    ----------
    n_resident
        CTAs, or clusters of them that do a work together, that the GPU keeps resident together.
    what
        What is counted, for the message.

    Raises
    ------
    UnsupportedError
        ``n_resident`` is less than the team size of the schedule: it could hang.
    """
    team = resolve(name, shape).team_size(shape)
    if n_resident < team:
        safe = ", ".join(repr(other) for other in names()
                         if ("causal" if shape.causal else "full") in get(other).MASKS
                         and get(other).team_size(shape) <= n_resident)
        raise UnsupportedError(
            f"schedule={name!r} needs {team} {what} resident together for this shape, and only "
            f"{n_resident} fit on this GPU: it would hang; use {safe or 'a larger GPU'}")
