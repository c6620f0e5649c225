"""What is checked: dashcupy's own functions here, somebody else's in `function`."""

from __future__ import annotations

from typing import Any, Protocol

from .. import driver, env, schedules
from ..api import attention, attention_backward, attention_plan
from ..errors import UnsupportedError
from ..plan import Plan, make_plan
from ..problem import CAUSAL_OF_MASK, Problem
from ..version import __version__
from .device import Place

# Names of the two kinds of runs; a backward is called by its schedule.
FORWARD = "forward"
RESULTS = {FORWARD: ("out", "lse"), "backward": ("dq", "dk", "dv")}
Arrays = dict[str, Any]
_ROW_AXIS = {"lse": 2}  # of the others: 1


class Subject(Protocol):
    """A forward, and backwards by name, over arrays [batch, len, heads, head_dim].

    Attributes
    ----------
    title : str
        For people and records; equal titles are compared by ``--expect``.
    place : Place
        Where its arrays lie.
    takes_scale : bool
        Whether another scale than 1/sqrt(head_dim) can be asked for.
    """

    title: str
    place: Place
    takes_scale: bool

    def backwards(self, problem: Problem, asked: str | None) -> list[str]:
        """Names of the backwards for a problem, or the one that is asked for.

        Raises
        ------
        UnsupportedError
            The one that is asked for cannot be planned for the problem there.
        """

    def fingerprint(self, problem: Problem, name: str) -> str:
        """What the bits of a run depend on beside the values; "" where nothing serves it."""

    def compute(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        """Results of the forward, or of a backward from ``results`` of the forward."""

    def replay(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        """The same from a CUDA graph; raises `UnsupportedError` where there is none."""

    def locate(self, problem: Problem, name: str, tensor: str, index: tuple[int, ...]) -> str:
        """The tile in which an element of a result lies, for a person; "" if unknown."""


class Dashcupy:
    """The functions of this package."""

    title = f"dashcupy {__version__}"
    takes_scale = True

    def __init__(self, place: Place):
        self.place = place

    def backwards(self, problem: Problem, asked: str | None) -> list[str]:
        if asked is None:
            return [name for name in schedules.names() if schedules.supports(name, problem.mask)]
        if asked != "auto" and not schedules.supports(asked, problem.mask):
            return []
        self._plan(problem, asked)
        return [asked]

    def fingerprint(self, problem: Problem, name: str) -> str:
        try:
            return self._plan(problem, name).fingerprint
        except UnsupportedError:
            return ""

    def compute(self, problem: Problem, name: str, arrays: Arrays, results: Arrays,
                into: tuple[Any, ...] | None = None, **options) -> Arrays:
        options |= {"causal": CAUSAL_OF_MASK[problem.mask], "scale": problem.scale}
        q, k, v = (arrays[x] for x in "qkv")
        if name == FORWARD:
            got = attention(q, k, v, return_lse=True, out=into, **options)
            return dict(zip(RESULTS[FORWARD], got))
        got = attention_backward(arrays["dout"], q, k, v, results["out"], results["lse"],
                                 schedule=name, grads=into, **options)
        return dict(zip(RESULTS["backward"], got))

    def replay(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        if self.place.kind == "cpu":
            raise UnsupportedError("there are no CUDA graphs on the CPU")
        cupy = driver.require_cupy()
        into = {tensor: cupy.empty_like(array) for tensor, array in
                self.compute(problem, name, arrays, results).items()}
        options = {}
        if name != FORWARD:
            plan = attention_plan(*(arrays[x] for x in "qkv"), causal=CAUSAL_OF_MASK[problem.mask],
                                  scale=problem.scale, schedule=name)
            options["workspace"] = cupy.empty(plan.workspace_bytes, "uint8")

        def work():
            self.compute(problem, name, arrays, results, tuple(into.values()), **options)

        cupy.cuda.runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            work()  # all kernels are loaded before the recording begins
            stream.synchronize()
            stream.begin_capture()
            try:
                work()
            finally:  # also after a refusal: the stream must be of use again
                graph = stream.end_capture()
            for array in into.values():
                array.data.memset_async(0xFF, array.nbytes, stream)
            graph.launch(stream=stream)
            stream.synchronize()
        return into

    def locate(self, problem: Problem, name: str, tensor: str, index: tuple[int, ...]) -> str:
        plan = self._plan(problem, name)
        row = index[_ROW_AXIS.get(tensor, 1)]
        if tensor in ("dk", "dv"):
            kv_tile = row // plan.config.kv_tile
            return f"kv tile {kv_tile}, which adds q tiles {_listed(_steps(plan, kv_tile))}"
        q_tile = row // plan.config.q_tile
        if tensor != "dq" or not schedules.get(plan.schedule).DETERMINISTIC:
            return f"q tile {q_tile}"
        return f"q tile {q_tile}, which adds kv tiles {_listed(_tickets(plan, q_tile))}"

    def _plan(self, problem: Problem, name: str) -> Plan:
        if name == FORWARD:
            return make_plan(problem, "forward", self.place.target)
        return make_plan(problem, "backward", self.place.target, name, debug=env.debug())


def _steps(plan: Plan, kv_tile: int) -> list[int]:
    """q tiles in the order in which a kv tile visits them."""
    schedule, shape = schedules.get(plan.schedule), plan.shape
    return [schedule.q_tile(shape, kv_tile, step)
            for step in range(schedule.num_steps(shape, kv_tile))]


def _tickets(plan: Plan, q_tile: int) -> list[int]:
    """kv tiles in the order in which they add into the dq of a q tile."""
    schedule, shape = schedules.get(plan.schedule), plan.shape
    return sorted(range(schedule.num_contributors(shape, q_tile)),
                  key=lambda kv_tile: schedule.ticket(shape, kv_tile, q_tile))


def _listed(tiles: list[int]) -> str:
    """Tile numbers in order, the middle of a long list left out."""
    shown = [*map(str, tiles)] if len(tiles) <= 12 else [
        *map(str, tiles[:6]), "...", *map(str, tiles[-3:])]
    return f"{', '.join(shown)} in this order" if len(tiles) > 1 else ", ".join(shown) or "none"
