"""Checkpoints: weights, optimizer, step and random states, whole tensors however a run splits."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from dashcupy.errors import InvalidInputError

from .parallel import Team
from .record import write_at_once


def save(path: Path, team: Team, model: nn.Module, optimizer: torch.optim.Optimizer, step: int,
         config: Mapping) -> None:
    """Write one file, from the first process; all must call it."""
    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if team.rank == 0:
        content = {"model": weights, "optimizer": state, "step": step, "config": dict(config),
                   "rng": torch.get_rng_state()}
        if team.device.type == "cuda":
            content["cuda_rng"] = torch.cuda.get_rng_state(team.device)
        write_at_once(path, lambda file: torch.save(content, file))


def load(path: Path, team: Team, model: nn.Module, optimizer: torch.optim.Optimizer,
         config: Mapping) -> int:
    """Put a run back to where a checkpoint left it.

    Returns
    -------
    int
        Steps done.

    Raises
    ------
    InvalidInputError
        No such file, another kind of file, or the checkpoint of a run with other options.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        then, weights, state, step, rng = (
            content[name] for name in ("config", "model", "optimizer", "step", "rng"))
        other = [f"{name} was {then.get(name)}, is {value}"
                 for name, value in config.items() if then.get(name) != value]
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError,
            AttributeError) as error:
        raise InvalidInputError(f"--resume {path}: no checkpoint can be read there "
                                f"({type(error).__name__}); give a file that --checkpoint-every "
                                f"wrote") from error
    if other:
        raise InvalidInputError(f"--resume {path}: that run had other options, so this one cannot "
                                f"go on to the same bits: {'; '.join(other)}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state,
                   options=StateDictOptions(full_state_dict=True))
    torch.set_rng_state(rng)
    if team.device.type == "cuda":
        torch.cuda.set_rng_state(content["cuda_rng"], team.device)
    return step
