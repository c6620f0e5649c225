"""One process, or the processes of ``torchrun``: who does what, and sums in a fixed order."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dashcupy.errors import InvalidInputError

MODES = ("none", "ddp", "fsdp2")
_BUCKET_MIB = 25
_LET_GO_S = 0.5


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them.

    Parameters
    ----------
    mode
        One of `MODES`.
    rank, size
        This process, and how many there are.
    device
        What it computes on.
    backend
        ``"nccl"``, ``"gloo"``, or None for one process alone.
    """

    mode: str
    rank: int
    size: int
    device: torch.device
    backend: str | None

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it is called: its gradients are means over all processes."""
        if self.mode == "ddp":
            # Buckets decide which part of the ring begins the sum of an element. Their size is
            # fixed here; DDP orders them once more after its first backward, so that one is made
            # and thrown away before the first step, in a resumed run as in a whole one.
            return nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=_BUCKET_MIB, gradient_as_bucket_view=True, static_graph=True)
        if self.mode == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            # One group for each layer, one for the rest: what is summed together never changes.
            for layer in model.layers:
                fully_shard(layer)
            return fully_shard(model)
        return model

    def share(self, rows):
        """The rows of a batch that this process computes."""
        each = len(rows) // self.size
        return rows[self.rank * each:(self.rank + 1) * each]

    def mean(self, loss: torch.Tensor) -> float:
        """Mean of a scalar over all processes, added in the order of their ranks."""
        if self.backend is None:
            return loss.item()
        parts = [torch.empty_like(loss) for _ in range(self.size)]
        dist.all_gather(parts, loss.detach())
        return (torch.stack(parts).cpu().sum() / self.size).item()

    def close(self) -> None:
        """Leave the group."""
        if self.backend == "gloo":
            # The destructor of gloo's group holds the interpreter lock while it joins its threads,
            # and a thread may want the lock to let go of its last sum: both wait for ever
            # (PyTorch 2.13). A sleep gives them the lock first.
            time.sleep(_LET_GO_S)
        if self.backend is not None:
            dist.destroy_process_group()


def join(mode: str, device: str, batch: int) -> Team:
    """Take this process's place; with ``torchrun``'s environment, together with the others.

    Parameters
    ----------
    mode
        One of `MODES`.
    device
        ``"cpu"`` or ``"cuda"``.
    batch
        Sequences of a step over all processes.

    Raises
    ------
    InvalidInputError
        The mode does not fit the number of processes, or the batch cannot be split.
    """
    rank, size = (int(os.environ.get(name, default))
                  for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if mode == "none":
        if size > 1:
            raise InvalidInputError(f"torchrun started {size} processes, and --parallel is none: "
                                    f"they would all do the same; give --parallel ddp or fsdp2")
        return Team(mode, 0, 1, torch.device(device), None)
    if "RANK" not in os.environ:
        raise InvalidInputError(f"--parallel {mode} needs torchrun: torchrun --nproc-per-node 2 "
                                f"-m bench.train_repro --parallel {mode} ...")
    if batch % size:
        raise InvalidInputError(f"--batch {batch} cannot be split over {size} processes; give a "
                                f"multiple of {size}")
    if device == "cpu":
        place, backend = torch.device("cpu"), "gloo"
    else:
        n_gpu = torch.cuda.device_count()
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % n_gpu)
        torch.cuda.set_device(place)
        # NCCL refuses two processes on one GPU; gloo adds in host memory.
        shared = int(os.environ["LOCAL_WORLD_SIZE"]) > n_gpu
        backend = "gloo" if shared else "nccl"
    dist.init_process_group(backend, device_id=place if backend == "nccl" else None)
    return Team(mode, rank, size, place, backend)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without shards; all processes of an FSDP2 run must ask at the same time."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
