"""How a GPU call is timed: interleaved variants, CUDA events, medians; see ``bench/README.md``."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Spins of torch.cuda._sleep per microsecond at the highest clock of the cards we know (GHz * 1000).
_CYCLES_PER_US = 2000
# How often each function runs in `sustained`.
_SHIFTS = 4
_PACKAGES = ("dashcupy", "cupy-cuda13x", "cupy-cuda12x", "torch", "numpy", "nvidia-cuda-nvrtc",
             "flash-attn", "flash-attn-3", "flash-attn-4", "triton")


@dataclass(frozen=True)
class Timing:
    """Times of one variant.

    Parameters
    ----------
    ms
        Median GPU time of a call, all its launches together, in milliseconds; of `sustained` the
        mean.
    ms_spread
        90th minus 10th percentile, in milliseconds.
    host_us
        Least time that the call kept the host busy, in microseconds; not part of ``ms``.
    """

    ms: float
    ms_spread: float
    host_us: float


def summarise(samples: Sequence[float], host_us: float) -> Timing:
    """Median and spread of GPU times in milliseconds."""
    if len(samples) < 2:
        return Timing(samples[0], 0.0, host_us)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), tenths[-1] - tenths[0], host_us)


def measure(variants: Mapping[str, Callable[[], object]], iters: int = 15,
            warmup: int = 5) -> dict[str, Timing]:
    """Time variants that do the same job, in turn, in one process.

    Each round calls every variant once, in an order drawn anew (the same in every run), so that
    drifting clocks and temperatures meet all alike, and no variant always follows the same one:
    after one that takes little power the card is faster. Before each call the GPU spins for as long
    as the host needs to enqueue it: what Python costs is hidden, as it is in a program that keeps
    the GPU busy (it is reported by itself, as ``host_us``).

    Parameters
    ----------
    variants
        Functions that enqueue their work on the current torch stream and return.
    iters, warmup
        Timed and untimed calls of each.

    Returns
    -------
    dict of str to Timing
    """
    import torch

    host_us = dict.fromkeys(variants, float("inf"))
    for _ in range(warmup):
        for name, call in variants.items():
            begin = time.perf_counter()
            call()
            host_us[name] = min(host_us[name], (time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()

    events = {name: [] for name in variants}
    for name in _drawn(variants, iters):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((1.5 * min(host_us[name], 5000) + 20) * _CYCLES_PER_US))
        start.record()
        variants[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: summarise([start.elapsed_time(end) for start, end in pairs], host_us[name])
            for name, pairs in events.items()}


def sustained(variants: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Timing]:
    """Time variants one after another, each for so long in all, without a pause.

    A card that has no rest comes to its power limit, and lowers its clock: as in training. Each
    variant has some shifts, in orders drawn anew; the first half of a shift does not count.

    Parameters
    ----------
    variants
        As for `measure`.
    seconds
        How long each runs.

    Returns
    -------
    dict of str to Timing
        ``ms`` is the mean, and there is no spread.
    """
    import torch

    host_us, counts = dict.fromkeys(variants, float("inf")), {}
    for name, call in variants.items():
        for _ in range(2):  # the first call may have to build something
            begin = time.perf_counter()
            call()
            host_us[name] = min(host_us[name], (time.perf_counter() - begin) * 1e6)
            torch.cuda.synchronize()
            whole_s = time.perf_counter() - begin
        counts[name] = max(2, math.ceil(seconds / _SHIFTS / 2 / whole_s))
    events = {name: [] for name in variants}
    for name in _drawn(variants, _SHIFTS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (start, end):
            for _ in range(counts[name]):
                variants[name]()
            event.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Timing(statistics.mean(start.elapsed_time(end) for start, end in pairs)
                         / counts[name], 0.0, host_us[name])
            for name, pairs in events.items()}


def _drawn(names: Iterable[str], n_round: int) -> Iterator[str]:
    """All names once in each round, in an order drawn anew: the same ones in every run."""
    draw, names = random.Random(0), list(names)
    for _ in range(n_round):
        yield from draw.sample(names, len(names))


def warm_card(seconds: float = 1.0) -> None:
    """Keep the card busy until its clocks have risen."""
    import torch

    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        a @ a
        torch.cuda.synchronize()


def same_bits(call: Callable[[], Sequence], runs: int = 3) -> bool:
    """Whether all results of ``call`` (torch tensors) have equal bytes over some runs."""
    import torch

    def as_bytes(tensor):
        return tensor.contiguous().view(torch.uint8)

    first = [as_bytes(tensor) for tensor in call()]
    return all(torch.equal(as_bytes(tensor), kept)
               for _ in range(runs - 1) for tensor, kept in zip(call(), first, strict=True))


def relative_error(got, truth) -> float:
    """Frobenius norm of the difference of two torch tensors over that of ``truth``."""
    truth = truth.float()
    return float((got.float() - truth).norm() / truth.norm())


def environment() -> dict:
    """Card, driver and versions: the part of a record that is the same for a whole run."""
    import torch

    driver = _nvidia_smi("driver_version").strip() or "unknown"
    return {"device": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda,
            "versions": versions() | {"cudnn": str(torch.backends.cudnn.version())},
            "date": datetime.date.today().isoformat()}


def versions() -> dict[str, str]:
    """Version of Python and of each installed package that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if importlib.util.find_spec("dashcupy"):
        import dashcupy

        found["dashcupy"] = dashcupy.__version__
    return found


def _nvidia_smi(fields: str) -> str:
    # The first line: scripts run on the first card that is visible.
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20,
                              check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


@contextlib.contextmanager
def watch_clocks(seconds: float = 0.5) -> Iterator[Callable[[], str]]:
    """Sample clocks, power and temperature while the block runs.

    Yields
    ------
    callable
        Stops sampling and returns one line of text for a log.
    """
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu,utilization.gpu",
               "--format=csv,noheader,nounits", f"--loop-ms={int(seconds * 1000)}"]
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
        except OSError:
            yield lambda: "clocks: nvidia-smi is not at hand"
            return

        def report() -> str:
            process.terminate()
            process.wait()
            log.seek(0)
            return describe_clocks(log.read())

        try:
            yield report
        finally:
            process.kill()
            process.wait()


def describe_clocks(log: str) -> str:
    """One line about samples of ``SM MHz, W, C, busy %``; idle samples do not count."""
    busy = []
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            clock, power, heat, load = (float(part) for part in line.split(","))
            if load >= 50:
                busy.append((clock, power, heat))
    if not busy:
        return "clocks: no sample under load"
    clocks, powers, heats = (sorted(column) for column in zip(*busy))
    return (f"clocks (not locked; {len(busy)} samples under load): SM {clocks[0]:.0f} to "
            f"{clocks[-1]:.0f} MHz, median {statistics.median(clocks):.0f}; "
            f"up to {powers[-1]:.0f} W, {heats[-1]:.0f} C")


def log(text: str) -> None:
    """A line for the reader of a long run, at once."""
    print(text, file=sys.stderr, flush=True)
