"""Event simulator: how long a schedule takes, who waits, and whether it can hang.

The machine: ``n_worker`` CTAs, one work at a time each. A step computes for ``compute``, then its
part of dq is added (``reduce``), and the next in line hears of it ``latency`` later. The part
waits for its turn in one of ``slots`` buffers:

* slots 0: compute and add exclude each other; the next step starts when the add is over,
  ``reduce + latency`` after the turn came.
* slots B: the step may end its compute only when the part of B steps before has been added. The
  adder of a CTA takes the parts in order, the next one when the last is visible (writer
  ``"serial"``) or as soon as the last is under way (``"pipelined"``).

Either way a CTA takes its next work only when the turn of its last part has come. If it did so
earlier, one CTA could hold two works of a team, and the team could hang.

Times have no unit: read them as multiples of the compute time of one step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import InvalidInputError, UnsupportedError
from .schedules import Schedule, Shape, resolve
from .schedules.order import decode, total_work

WRITERS = ("serial", "pipelined")
ASSIGNMENTS = ("counter", "round_robin")


@dataclass(frozen=True)
class Costs:
    """Times of one step, and what may overlap; see the module text.

    ``ordered=False`` is the model of a backward that adds in any order: no turns, no latency.
    """

    compute: float = 1.0
    reduce: float = 0.25
    latency: float = 0.0
    slots: int = 0
    writer: str = "serial"
    ordered: bool = True

    def __post_init__(self):
        for name in ("compute", "reduce", "latency", "slots"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise InvalidInputError(f"{name}={value!r}: must be a finite number >= 0")
        if self.slots != int(self.slots):
            raise InvalidInputError(f"slots={self.slots!r}: must be a whole number")
        if self.writer not in WRITERS:
            raise InvalidInputError(
                f"writer={self.writer!r} is not known (allowed: {', '.join(WRITERS)})")

    @property
    def hop(self) -> float:
        """From the turn of one contributor to the turn of the next."""
        return self.reduce + (self.latency if self.ordered else 0.0)

    @property
    def adder_period(self) -> float:
        """From one add of a CTA to its next, at least."""
        return self.reduce if self.slots and self.writer == "pipelined" else self.hop

    @property
    def step(self) -> float:
        """What a step takes when nothing waits."""
        return max(self.compute, self.adder_period) if self.slots else self.compute + self.hop


class Step(NamedTuple):
    """One (kv tile, q tile) of one q head, with its times."""

    worker: int
    head: int  # batch * n_kv_head + kv_head
    q_head: int  # inside the group of that kv head
    work: int
    kv_tile: int
    q_tile: int
    ticket: int
    compute_start: float
    compute_end: float  # held up until a slot is free, if there are slots
    reduce_start: float
    reduce_end: float


@dataclass(frozen=True)
class Simulation:
    """Result of ``simulate``; lists have one entry per worker, times are as in ``Costs``.

    ``busy + stall + idle == makespan`` for every worker: at work on steps, held up by an earlier
    add, and without work.
    """

    makespan: float  # math.inf after a deadlock
    work_bound: float  # no schedule is faster on so many workers
    busy: list[float]
    stall: list[float]
    idle: list[float]
    steps: list[Step]
    deadlock: str  # "" or who waits for whom

    @property
    def efficiency(self) -> float:
        """Work bound over makespan."""
        return self.work_bound / self.makespan if self.makespan else 1.0


Cell = tuple[int, int, int, int]  # kv tile, q head, q tile, ticket


class _Worker:
    """A CTA: the work in hand, and how far its compute and its adder are."""

    def __init__(self, index: int):
        self.index = index
        self.head = self.work = -1
        self.has_work = False
        self.cells: list[Cell] = []  # of the work in hand
        self.next_cell = 0
        # Computed, not yet added: cell, start and end of its compute.
        self.pending: deque[tuple[Cell, float, float]] = deque()
        self.compute_free = 0.0
        self.adder_free = 0.0
        self.slot_free: list[float] = []  # when each part left its slot
        self.stall = 0.0


def simulate(schedule: Schedule | str, shape: Shape, n_head: int, n_worker: int,
             costs: Costs | None = None, *, assignment: str = "counter",
             q_per_kv: int = 1, head_group: int | None = None) -> Simulation:
    """Run a schedule.

    Parameters
    ----------
    schedule
        A name, or anything with the functions of ``schedules.contract.Schedule``. In one that is
        not deterministic nobody waits for a turn.
    n_head
        kv heads of the whole batch.
    n_worker
        CTAs that are resident together.
    assignment
        ``"counter"``: a CTA takes the next work when it has done its last, as the kernels do.
        ``"round_robin"``: CTA w does works w, w + n_worker, ... of the same order.
    q_per_kv
        q heads that share a kv head: at each step of the schedule a CTA visits one after another.
    head_group
        kv heads that take turns as works are handed out (see ``schedules.order``); default: all.

    Raises
    ------
    InvalidInputError
        Bad sizes or names, or a schedule that is not defined for the mask.
    """
    if isinstance(schedule, str):
        schedule = resolve(schedule, shape)
    for name, value in (("n_head", n_head), ("n_worker", n_worker), ("q_per_kv", q_per_kv)):
        if value < 1:
            raise InvalidInputError(f"{name}={value}: must be at least 1")
    head_group = n_head if head_group is None else head_group
    if not 1 <= head_group <= n_head:
        raise InvalidInputError(f"head_group={head_group}: must be 1 to n_head={n_head}")
    if assignment not in ASSIGNMENTS:
        raise InvalidInputError(
            f"assignment={assignment!r} is not known (allowed: {', '.join(ASSIGNMENTS)})")
    costs = costs or Costs()
    if not schedule.DETERMINISTIC:
        costs = replace(costs, ordered=False)
    return _Run(schedule, shape, n_head, n_worker, costs, q_per_kv, head_group).run(assignment)


def check_resident(schedule: Schedule | str, shape: Shape, n_head: int, n_resident: int,
                   q_per_kv: int = 1, head_group: int | None = None) -> None:
    """Prove that ``n_resident`` CTAs that take works from the counter cannot hang.

    One run proves it for every timing. What can happen next (the next work is taken by a free
    CTA, or a part whose turn has come is added) stays possible until it does happen, whatever
    else happens before. So all runs end in the same state: finished, or the same deadlock. Nor do
    slots matter: a CTA adds its parts in the same order, and has added all when it takes a work.

    Raises
    ------
    UnsupportedError
        It would hang; the message says who waits for whom.
    """
    result = simulate(schedule, shape, n_head, n_resident, Costs(slots=0), q_per_kv=q_per_kv,
                      head_group=head_group)
    if result.deadlock:
        raise UnsupportedError(f"{n_resident} resident CTAs would hang: {result.deadlock}")


class _Run:
    """One simulation.

    No clock is needed: a time is known as soon as those it depends on are. So each worker is
    taken as far as it can go, and sleeps until the ticket before its own is known. Only taking a
    work from the counter needs the earliest of all workers; a sleeping one is never that, since
    it waits for a work that is not yet taken.
    """

    def __init__(self, schedule, shape, n_head, n_worker, costs, q_per_kv, head_group):
        self.schedule, self.shape, self.n_head, self.costs = schedule, shape, n_head, costs
        self.q_per_kv, self.head_group = q_per_kv, head_group
        # The same for every head, in the order of the CTA.
        self.cells = [self._cells_of(work) for work in range(schedule.num_work(shape))]
        self.workers = [_Worker(index) for index in range(n_worker)]
        n_sum = n_head * q_per_kv * shape.n_q  # sums of dq, one for each q tile of each q head
        self.next_ticket = [0] * n_sum
        self.turn_time = [0.0] * n_sum
        self.asleep: dict[tuple[int, int], _Worker] = {}  # by (sum, ticket)
        self.awake: list[_Worker] = []
        self.free = [(0.0, index) for index in range(n_worker)]
        self.steps: list[Step] = []

    def run(self, assignment: str) -> Simulation:
        n_worker = len(self.workers)
        total = total_work(self.schedule, self.shape, self.n_head)
        if assignment == "counter":
            queues = [deque(range(total))]
        else:
            queues = [deque(range(w, total, n_worker)) for w in range(n_worker)]
        while self.free:
            time, index = heapq.heappop(self.free)
            queue = queues[index % len(queues)]
            if queue:
                self._take(self.workers[index], time, queue.popleft())
        return self._result()

    def _cells_of(self, work: int) -> list[Cell]:
        s, shape, cells = self.schedule, self.shape, []
        for part in range(s.work_size(shape, work)):
            kv_tile = s.kv_tile(shape, work, part)
            visits = [s.q_tile(shape, kv_tile, i) for i in range(s.num_steps(shape, kv_tile))]
            tickets = [s.ticket(shape, kv_tile, q_tile) for q_tile in visits]
            cells += [(kv_tile, q_head, *cell) for cell in zip(visits, tickets, strict=True)
                      for q_head in range(self.q_per_kv)]
        return cells

    def _sum(self, head: int, q_head: int, q_tile: int) -> int:
        return (head * self.q_per_kv + q_head) * self.shape.n_q + q_tile

    def _take(self, worker: _Worker, time: float, global_work: int) -> None:
        worker.head, worker.work = decode(self.schedule, self.shape, self.n_head, global_work,
                                          self.head_group)
        worker.cells, worker.next_cell = self.cells[worker.work], 0
        worker.compute_free = time
        worker.has_work = True
        self.awake.append(worker)
        while self.awake:
            self._advance(self.awake.pop())

    def _advance(self, worker: _Worker) -> None:
        """Take a worker as far as known times allow."""
        moved = True
        while moved:
            while (worker.next_cell < len(worker.cells)
                    and len(worker.pending) < max(self.costs.slots, 1)):
                self._compute(worker)
            moved = self._add(worker)
        if worker.has_work and not worker.pending:
            worker.has_work = False
            heapq.heappush(self.free, (worker.compute_free, worker.index))

    def _compute(self, worker: _Worker) -> None:
        start = worker.compute_free
        end = start + self.costs.compute
        if self.costs.slots:
            waits_for = len(worker.slot_free) + len(worker.pending) - self.costs.slots
            if waits_for >= 0:
                end = self._hold_up(worker, end, worker.slot_free[waits_for])
        worker.compute_free = end
        worker.pending.append((worker.cells[worker.next_cell], start, end))
        worker.next_cell += 1

    def _add(self, worker: _Worker) -> bool:
        """Add the oldest part, if its turn is known; else sleep until it is."""
        if not worker.pending:
            return False
        costs = self.costs
        cell, compute_start, compute_end = worker.pending[0]
        kv_tile, q_head, q_tile, ticket = cell
        dq = self._sum(worker.head, q_head, q_tile)
        begin = max(compute_end, worker.adder_free)
        if costs.ordered:
            if self.next_ticket[dq] != ticket:
                self.asleep[dq, ticket] = worker
                return False
            begin = max(begin, self.turn_time[dq])
        worker.pending.popleft()
        worker.slot_free.append(begin + costs.reduce)
        worker.adder_free = begin + costs.adder_period
        if not costs.slots:
            worker.compute_free = self._hold_up(worker, compute_end, begin) + costs.hop
        elif not worker.pending and worker.next_cell == len(worker.cells):
            worker.compute_free = self._hold_up(worker, compute_end, begin)
        self.turn_time[dq] = max(self.turn_time[dq], begin + costs.hop)
        self.next_ticket[dq] += 1
        self.steps.append(Step(worker.index, worker.head, q_head, worker.work, kv_tile, q_tile,
                               ticket, compute_start, compute_end, begin, begin + costs.reduce))
        successor = self.asleep.pop((dq, ticket + 1), None)
        if successor:
            self.awake.append(successor)
        return True

    @staticmethod
    def _hold_up(worker: _Worker, ready: float, until: float) -> float:
        """When a worker that is ready, but must wait ``until`` then, goes on."""
        worker.stall += max(0.0, until - ready)
        return max(ready, until)

    def _result(self) -> Simulation:
        costs, shape, n_worker = self.costs, self.shape, len(self.workers)
        deadlock = self._who_waits() if self.asleep else ""
        end = max(self.turn_time, default=0.0)
        makespan = math.inf if deadlock else end
        n_steps = [shape.n_q - shape.first_q_tile(kv) for kv in range(shape.n_kv)]
        total, longest = sum(n_steps) * self.n_head, max(n_steps, default=0)
        busy_per_step = costs.compute if costs.slots else costs.step
        busy = [len(worker.slot_free) * busy_per_step for worker in self.workers]
        stall = [worker.stall for worker in self.workers]
        return Simulation(
            makespan=makespan,
            work_bound=max(longest, total / n_worker) * self.q_per_kv * costs.step,
            busy=busy, stall=stall,
            idle=[makespan - b - s for b, s in zip(busy, stall, strict=True)],
            steps=self.steps, deadlock=deadlock)

    def _who_waits(self) -> str:
        """The chain of waiting CTAs, up to where it closes or to a work that nobody has taken."""
        holder = {(worker.head, worker.work): worker
                  for worker in self.workers if worker.has_work}
        worker, chain, seen = next(iter(self.asleep.values())), [], set()
        while worker is not None and worker.index not in seen:
            seen.add(worker.index)
            kv_tile, q_head, q_tile, _ = worker.pending[0][0]
            due = self.next_ticket[self._sum(worker.head, q_head, q_tile)]
            work, first = next((work, cell[0]) for work, cells in enumerate(self.cells)
                               for cell in cells if cell[1:] == (q_head, q_tile, due))
            worker_name = f"CTA {worker.index} (head {worker.head}, kv tile {kv_tile})"
            worker = holder.get((worker.head, work))
            chain.append(f"{worker_name} waits on q tile {q_tile} for kv tile {first}"
                         + ("" if worker else f" of work {work}, which no CTA has taken"))
        return ", ".join(chain) + (f", and CTA {worker.index} stands above" if worker else "")
