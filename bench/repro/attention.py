"""The attention of the model by name, with its backward in the mode that the name promises."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.nn.functional as F

import dashcupy.torch
from dashcupy import schedules

from .. import peers

KINDS = ("dashcupy", "sdpa", "flash", "cudnn")
GPU_KINDS = ("flash", "cudnn")
DETERMINISTIC = "deterministic"
DEFAULT = "default: not deterministic"
_CAUSAL = schedules.Shape.from_counts(1, 1, True)


class Stopwatch:
    """Spans of time on the GPU's own clock (of the host's, without a GPU); waits for nothing."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._starts: list = []
        self._ends: list = []

    def start(self, *_) -> None:
        """Begin a span; a hook of autograd may call it."""
        self._starts.append(self._now())

    def stop(self, *_) -> None:
        """End the span; a hook of autograd may call it."""
        self._ends.append(self._now())

    def milliseconds(self) -> float:
        """Sum of all spans; waits for the GPU."""
        if self._cuda:
            torch.cuda.synchronize()
            return sum(map(torch.cuda.Event.elapsed_time, self._starts, self._ends))
        return 1e3 * (sum(self._ends) - sum(self._starts))

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Attention:
    """Causal attention of [batch, len, heads, head_dim] tensors.

    Parameters
    ----------
    kind
        One of `KINDS`: ours; the function that PyTorch picks; its FlashAttention-2; its cuDNN.
    schedule
        The order of our backward.

    Attributes
    ----------
    backward : str or None
        Name of the autograd node that the last call left behind: what its backward runs.
    watch : Stopwatch or None
        Measures forward and backward while it is set.
    """

    def __init__(self, kind: str, schedule: str):
        self.kind, self.schedule = kind, schedule
        ours = kind == "dashcupy" and schedules.resolve(schedule, _CAUSAL).DETERMINISTIC
        self.mode = DETERMINISTIC if ours else DEFAULT
        self.backward: str | None = None
        self.watch: Stopwatch | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        compute = self._ours if self.kind == "dashcupy" else self._peer
        if self.watch:
            self.watch.start()
        if self.mode == DETERMINISTIC:
            out = compute(q, k, v)
        else:
            # Under the deterministic switch PyTorch would take FlashAttention-2's slower
            # deterministic backward, and refuse cuDNN. What people train with is the default, so
            # the switch is off for this call, and again while autograd runs its node.
            with peers.deterministic(False):
                out = compute(q, k, v)
            out.grad_fn.register_prehook(lambda *_: torch.use_deterministic_algorithms(False))
            out.grad_fn.register_hook(lambda *_: torch.use_deterministic_algorithms(True))
        self.backward = type(out.grad_fn).__name__
        if self.watch:
            self.watch.stop()
            out.grad_fn.register_prehook(self.watch.start)
            out.grad_fn.register_hook(self.watch.stop)
        return out if self.kind == "dashcupy" else out.transpose(1, 2)

    def _ours(self, q, k, v):
        return dashcupy.torch.attention(q, k, v, causal=True, schedule=self.schedule)

    def _peer(self, q, k, v):
        with _backend(self.kind):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                enable_gqa=q.shape[2] != k.shape[2])


def _backend(kind: str) -> contextlib.AbstractContextManager:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if kind == "sdpa":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if kind == "flash"
                       else SDPBackend.CUDNN_ATTENTION)
