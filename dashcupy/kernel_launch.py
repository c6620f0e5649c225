"""Launches through the driver: grid, stream, and when the CTAs may and must run."""

from __future__ import annotations

import ctypes
import functools

from . import driver

# CUlaunchAttributeID of the driver's cuda.h.
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
_MAX_STREAMS = 64  # whose configs are kept


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes: a flag, or three dimensions."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("x", ctypes.c_uint),
                ("y", ctypes.c_uint), ("z", ctypes.c_uint), ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [(f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"]
    _fields_ += [("smem_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
                 ("attributes", ctypes.POINTER(_Attribute)), ("n_attribute", ctypes.c_uint)]


class KernelLaunch:
    """A launch with a fixed grid; called with a stream and the arguments, returns the CUresult.

    The driver copies the arguments during the call. Threads may share a launch.

    Parameters
    ----------
    function
        Handle of the kernel.
    grid, threads, smem_bytes
        CTAs, and threads and dynamic shared memory of each.
    cooperative
        Whether all CTAs must run at the same time.
    early
        Whether they may run before the kernel before it in the stream has ended (from 9.0 on).
    """

    def __init__(self, function: int, grid: int, threads: int, smem_bytes: int, cooperative: bool,
                 early: bool):
        ids = (*[_COOPERATIVE] * cooperative, *[_PROGRAMMATIC_STREAM_SERIALIZATION] * early)
        self._attributes = (_Attribute * len(ids))(*[_Attribute(id=number, x=1)
                                                     for number in ids])
        self._values = (grid, 1, 1, threads, 1, 1, smem_bytes)
        self._launch, self._function = _launch(), ctypes.c_void_p(function)
        self._configs: dict[int, ctypes.Array] = {}  # by stream; never written again

    def __call__(self, stream: int, arguments: ctypes.Array) -> int:
        config = self._configs.get(stream)
        if config is None:
            if len(self._configs) >= _MAX_STREAMS:
                self._configs.clear()
            config = self._configs[stream] = ctypes.byref(_Config(
                *self._values, stream, self._attributes, len(self._attributes)))
        return self._launch(config, self._function, arguments, None)


def resident_clusters(function: int, cluster: int, threads: int, smem_bytes: int) -> int:
    """Clusters of a kernel that fit on the current GPU at the same time.

    Parameters
    ----------
    function
        Handle of the kernel.
    cluster
        CTAs of a cluster.
    threads, smem_bytes
        Threads and dynamic shared memory of a CTA.
    """
    size = _Attribute(id=_CLUSTER_DIMENSION, x=cluster, y=1, z=1)
    config = _Config(cluster, 1, 1, threads, 1, 1, smem_bytes, None, ctypes.pointer(size), 1)
    count = ctypes.c_int()
    driver.call("cuOccupancyMaxActiveClusters", ctypes.byref(count), ctypes.c_void_p(function),
                ctypes.byref(config))
    return count.value


@functools.cache
def _launch():
    function = driver.library().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function
