"""A call that is settled but for its addresses; calls of that kind are known again by a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import arrays
from .arrays import Borrowed, Framework
from .errors import UnsupportedError
from .launch import Launcher
from .outputs import Apart

# By all that such a call depends on: options, and what `Framework.look` says of its arrays.
_known: dict[tuple, Ready] = {}
_MAX_KNOWN = 1024


class Ready:
    """All that was found out and checked about a call on a GPU, ready for addresses.

    Parameters
    ----------
    framework
        Where the arrays come from.
    launcher
        Kernels and strides.
    wanted
        Shape and dtype of each result.
    inputs, given
        Arrays of a call of this kind; None for what is not given or is to be made. None is kept.
    workspace
        The same for the workspace.
    """

    def __init__(self, framework: Framework, launcher: Launcher,
                 wanted: Sequence[tuple[tuple[int, ...], str]], inputs: Sequence[Borrowed | None],
                 given: Sequence[Borrowed | None], workspace: Borrowed | None):
        self.device = inputs[0].device
        self._framework = framework
        self._launcher = launcher
        self._waits = "report" in launcher.plan.cleared
        self._n_input = len(inputs)
        self._missing = tuple(
            (i, framework.maker(inputs[0], *shape_dtype))
            for i, (output, shape_dtype) in enumerate(zip(given, wanted)) if output is None)
        n_bytes = launcher.plan.workspace_bytes
        self._make_workspace = None
        if n_bytes and workspace is None:
            self._make_workspace = framework.maker(inputs[0], (n_bytes,), "uint8")
        self._apart = None
        written = (*given, workspace)
        if any(b is not None for b in written):
            self._apart = Apart([None if b is None else b.layout for b in (*inputs, *written)],
                                len(inputs))

    def serves(self, pointers: Sequence[int]) -> bool:
        """Whether what is written at these addresses shares no memory with another array."""
        return self._apart is None or self._apart.holds(pointers)

    def enqueue(self, pointers: list[int], inputs: Sequence[Any], given: Sequence[Any],
                workspace: Any, n_wanted: int) -> list[Any]:
        """Make what is missing and enqueue the kernels on the current GPU, that of the arrays.

        Parameters
        ----------
        pointers
            Addresses of inputs, results and workspace; 0 for what is not given. Changed.
        inputs, given, workspace
            The arrays, or views that keep their memory.
        n_wanted
            How many of the results the caller gets.
        """
        framework = self._framework
        stream = framework.stream(self.device)
        if (self._waits or not framework.graph_owns_memory) and framework.is_capturing(stream):
            self._require_capturable(n_wanted)
        results = list(given)
        for i, make in self._missing:
            results[i], pointers[self._n_input + i] = make()
        address = pointers.pop()
        if self._make_workspace is not None:
            workspace, address = self._make_workspace()
        # The workspace may go back to its allocator right after the launch: CuPy and torch hand
        # memory out again in the order of the stream that it was allocated on, which is this one.
        self._launcher(pointers, address, stream)
        if framework.holds:
            arrays.hold(stream, [*inputs, *results, workspace])
            for i, _ in self._missing:
                results[i] = framework.deliver(results[i])
        return results

    def _require_capturable(self, n_wanted: int) -> None:
        """Refuse to record a CUDA graph that would use memory which nobody keeps for its replays.

        Raises
        ------
        UnsupportedError
            Unless all of that memory is the caller's, and the arrays themselves can be kept. Also
            for a debug build, which waits for the GPU.
        """
        framework, plan = self._framework, self._launcher.plan
        if self._waits:
            raise UnsupportedError("a CUDA graph is being captured, and with DASHCUPY_DEBUG=1 "
                                   "the backward waits for the GPU, which no capture allows: set "
                                   "DASHCUPY_DEBUG=0 for the capture")
        if framework.holds:
            raise UnsupportedError(f"a CUDA graph cannot be captured from {framework.name} arrays: "
                                   f"nothing would keep them for the replays; give CuPy arrays")
        missing = []
        if plan.direction == "forward" and n_wanted == 1:
            missing.append("return_lse=True")
        if self._make_workspace is not None:
            missing.append(
                f"workspace= (uint8, {plan.workspace_bytes} bytes)" if plan.direction == "backward"
                else "arrays whose addresses and strides are multiples of 16 bytes (others are "
                "copied to scratch memory first)")
        if missing:
            raise UnsupportedError(
                f"a CUDA graph is being captured, and memory that is allocated now and not "
                f"returned goes back to CuPy's pool before the replays: also give "
                f"{', '.join(missing)}, and keep all results as long as the graph")


def find(key: tuple, pointers: Sequence[int]) -> Ready | None:
    """The call of that kind, if there was one and its checks hold for these addresses too."""
    ready = _known.get(key)
    return ready if ready is not None and ready.serves(pointers) else None


def remember(key: tuple, ready: Ready) -> None:
    """Let `find` know a call that has passed every check."""
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[key] = ready


def forget() -> None:
    """Forget all calls."""
    _known.clear()
