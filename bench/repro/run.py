"""One training run: steps, digests, checkpoints, and the record that it leaves."""

from __future__ import annotations

import argparse
import io
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import dashcupy
from dashcupy.errors import DeviceError, InvalidInputError
from dashcupy.terminal import Progress

from . import checkpoint, data, parallel, record, settings
from .attention import GPU_KINDS, Attention, Stopwatch
from .model import Decoder

CLIP = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
WARMUP = 30  # steps until the learning rate is reached; a tenth of a shorter run
_WATCHED_STEPS = 3


def train(options: argparse.Namespace) -> dict:
    """Train as the options of ``bench.train_repro`` say.

    Returns
    -------
    dict
        The record; it is written to ``options.json``, too, by the first process.

    Raises
    ------
    InvalidInputError, DeviceError
        Options that do not go together, or no GPU for them.
    """
    applied = settings.apply()
    device = _device(options.device)
    if device == "cpu" and options.attention in GPU_KINDS:
        raise DeviceError(f"--attention {options.attention} runs on a GPU only, and this run is on "
                          f"the CPU; give --attention dashcupy or sdpa")
    team = parallel.join(options.parallel, device, options.batch)
    try:
        if team.rank == 0:
            for path in _files(options):
                record.require_writable(path)
        run = _Run(options, team, data.read(options.text))
        found = run.go() | {"deterministic": applied}
        if options.json and team.rank == 0:
            record.write(options.json, found)
        return found
    finally:
        team.close()


def _files(options: argparse.Namespace) -> Iterator[Path]:
    """What a run will write, the checkpoints by the first of them."""
    if options.json:
        yield options.json
    if options.checkpoint_every:
        yield _checkpoint_path(options, options.checkpoint_every)


def _checkpoint_path(options: argparse.Namespace, done: int) -> Path:
    name = options.json.stem if options.json else "train"
    return Path(options.checkpoint_dir) / f"{name}-step{done}.pt"


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    warmup = min(WARMUP, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: PyTorch sees no GPU here; give --device cpu")
    return wanted


class _Run:
    def __init__(self, options: argparse.Namespace, team: parallel.Team, text: data.Text):
        self.options, self.team, self.text = options, team, text
        self.dtype = torch.bfloat16 if team.device.type == "cuda" else torch.float32
        self.attention = Attention(options.attention, options.schedule)
        torch.manual_seed(options.seed)  # nothing draws from it; checkpoints carry it all the same
        self.decoder = Decoder(options.size, options.head_dim, options.kv_heads, options.mlp,
                               options.seqlen, self.attention, self.dtype, options.seed,
                               team.device)
        self.n_parameter = sum(weight.numel() for weight in self.decoder.parameters())
        self.model = team.wrap(self.decoder)
        weights = list(self.decoder.parameters())
        # Fused: each element is updated by itself, in one kernel; there is no sum to order.
        self.optimizer = torch.optim.AdamW(
            [{"params": [w for w in weights if w.ndim > 1], "weight_decay": WEIGHT_DECAY},
             {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0}],
            lr=options.lr, betas=BETAS, fused=True)
        text_record = text.describe()
        self.config = {name: getattr(options, name) for name in (
            "size", "head_dim", "kv_heads", "mlp", "seqlen", "batch", "steps", "seed", "lr",
            "attention", "schedule", "parallel")} | {
            "processes": team.size, "device": team.device.type,
            "dtype": str(self.dtype).removeprefix("torch."), "text": text_record["sha256"]}
        self.facts = {"config": self.config, "parameters": self.n_parameter, "text": text_record,
                      "backend": team.backend, "machine": record.machine(team.device)}

    def go(self) -> dict:
        """All steps, then the steps that are only watched."""
        options = self.options
        first = self._resume()
        self._backward(first)  # thrown away: compiles kernels, and DDP settles its buckets
        self.optimizer.zero_grad()
        losses, norms, times, gradients = [], [], [], {}
        chatty = self.team.rank == 0
        if chatty:
            print(self._headline(first), flush=True)
        with Progress(options.steps - first, None if chatty else io.StringIO()) as progress:
            for step in range(first, options.steps):
                begin = time.perf_counter()
                loss = self._backward(step)
                if self._hashes(step):
                    self._wait()
                    paused = time.perf_counter()
                    gradients[str(step)] = record.digests(
                        (name, w.grad) for name, w in self.decoder.named_parameters())
                    begin += time.perf_counter() - paused
                norms.append(self._update(step))
                losses.append(self.team.mean(loss))
                self._wait()
                times.append(1e3 * (time.perf_counter() - begin))
                progress.start(self._status(step, losses[-1], times))
                progress.step()
                if chatty and (step + 1) % max(1, options.steps // 10) == 0:
                    progress.clear()
                    print(self._status(step, losses[-1], times), flush=True)
                self._save(step + 1)
        found = self.facts | {
            "first_step": first, "losses": losses, "losses_hex": [x.hex() for x in losses],
            "gradient_norms": norms, "gradients": gradients, "step_ms": times,
            "weights": record.digests(self.decoder.named_parameters()),
            "attention": self._describe_attention()}
        found["step_ms_median"] = statistics.median(times)
        found["tokens_per_s"] = self._tokens_per_s(times)
        if self.team.device.type == "cuda":
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        found["attention"]["share_of_step"] = self._share()
        if chatty:
            print(self._summary(found), flush=True)
        return found

    def _backward(self, step: int) -> torch.Tensor:
        options, device = self.options, self.team.device
        rows = self.team.share(data.batch(self.text, options.seed, step, options.batch,
                                          options.seqlen))
        rows = torch.from_numpy(rows).to(device)
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        return loss

    def _update(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options.steps, self.options.lr)
        norm = parallel.whole(torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def _share(self) -> float:
        """Part of a step that attention takes, forward and backward, over a few more steps."""
        whole, self.attention.watch = (Stopwatch(self.team.device) for _ in range(2))
        for step in range(self.options.steps, self.options.steps + _WATCHED_STEPS):
            whole.start()
            self._backward(step)
            self._update(step)
            whole.stop()
        return self.attention.watch.milliseconds() / whole.milliseconds()

    def _hashes(self, step: int) -> bool:
        every = self.options.hash_every
        return every > 0 and (step % every == 0 or step == self.options.steps - 1)

    def _save(self, done: int) -> None:
        every = self.options.checkpoint_every
        if every and done % every == 0:
            checkpoint.save(_checkpoint_path(self.options, done), self.team, self.decoder,
                            self.optimizer, done, self.config)

    def _resume(self) -> int:
        if not self.options.resume:
            return 0
        first = checkpoint.load(self.options.resume, self.team, self.decoder, self.optimizer,
                                self.config)
        if first >= self.options.steps:
            raise InvalidInputError(f"--resume {self.options.resume}: {first} steps are done, and "
                                    f"--steps {self.options.steps} asks for no more")
        return first

    def _describe_attention(self) -> dict:
        found = {"name": self.attention.kind, "backward": self.attention.backward,
                 "backward_mode": self.attention.mode}
        if self.attention.kind == "dashcupy":
            layer = self.decoder.layers[0].attention
            q, k = (torch.empty(self.options.batch // self.team.size, self.options.seqlen,
                                n_head, layer.head_dim, device=self.team.device, dtype=self.dtype)
                    for n_head in (layer.q_heads, layer.kv_heads))
            plan = dashcupy.attention_plan(q, k, k, causal=True, schedule=self.options.schedule)
            found |= {"schedule_used": plan.schedule, "fingerprint": plan.fingerprint}
        return found

    def _wait(self) -> None:
        if self.team.device.type == "cuda":
            torch.cuda.synchronize()

    def _tokens_per_s(self, times: list[float]) -> float:
        return 1e3 * self.options.batch * self.options.seqlen / statistics.median(times)

    def _headline(self, first: int) -> str:
        options = self.options
        where = self.facts["machine"]["device"]
        several = f" x {self.team.size} ({options.parallel}, {self.team.backend})"
        return (f"{self.n_parameter / 1e6:.1f} M parameters, {self.config['dtype']}, attention "
                f"{options.attention}, {options.batch} x {options.seqlen} bytes a step of "
                f"{len(self.text.content) / 1e6:.1f} MB, {where}"
                f"{several if self.team.size > 1 else ''}; steps {first} to {options.steps - 1}")

    def _status(self, step: int, loss: float, times: list[float]) -> str:
        return (f"step {step + 1}/{self.options.steps}  loss {loss:.4f}  "
                f"{self._tokens_per_s(times[-10:]):,.0f} tokens/s")

    def _summary(self, found: dict) -> str:
        kept = f"; record in {self.options.json}" if self.options.json else ""
        return (f"step {found['step_ms_median']:.1f} ms (median), attention "
                f"{100 * found['attention']['share_of_step']:.0f} % of it{kept}")
