"""The rules of ``dashcupy.simulate`` once more, tick by tick: slow, and easy to believe."""

from dashcupy.schedules import decode, total_work
from dashcupy.simulate import Step


class Worker:
    def __init__(self, index, queue):
        self.index, self.queue = index, queue
        self.cells = []  # still to compute: (head, work, kv tile, q tile, ticket)
        self.started = None  # when the compute in hand began
        self.parts = []  # computed: [cell, compute start, compute end, add start or None]
        self.free_at = 0  # with no slot: when the last add was over


def naive_steps(schedule, shape, n_head, n_worker, costs, assignment, head_group):
    """All steps with whole-number costs, sorted; one q head to each kv head."""
    places = [decode(schedule, shape, n_head, number, head_group)
              for number in range(total_work(schedule, shape, n_head))]
    if assignment == "counter":
        workers = [Worker(index, places) for index in range(n_worker)]
    else:
        workers = [Worker(index, places[index::n_worker]) for index in range(n_worker)]
    visible = {}  # (head, q tile) -> when each ticket is visible, in order
    tick = 0
    while any(w.queue or w.cells or _adds_left(w) for w in workers):
        while (any(_act(w, tick, costs, visible) for w in workers)
               or any(_take(w, tick, costs, schedule, shape) for w in workers)):
            pass
        tick += 1
    return sorted(Step(w.index, head, 0, work, kv, q, ticket, start, end, add, add + costs.reduce)
                  for w in workers
                  for (head, work, kv, q, ticket), start, end, add in w.parts)


def _adds_left(w):
    return [part for part in w.parts if part[3] is None]


def _take(w, tick, costs, schedule, shape):
    """Take the next work, if this worker has none; False if not."""
    if w.cells or not w.queue or _adds_left(w) or not costs.slots and w.free_at > tick:
        return False
    head, work = w.queue.pop(0)
    w.cells = [(head, work, kv, q, schedule.ticket(shape, kv, q))
               for kv in (schedule.kv_tile(shape, work, part)
                          for part in range(schedule.work_size(shape, work)))
               for q in (schedule.q_tile(shape, kv, step)
                         for step in range(schedule.num_steps(shape, kv)))]
    return True


def _act(w, tick, costs, visible):
    """Do one thing that is possible now, other than to take a work; False if there is none."""
    if _adds_left(w):
        part = _adds_left(w)[0]
        before = w.parts[:w.parts.index(part)]
        head, _, _, q, ticket = part[0]
        turns = visible.setdefault((head, q), [])
        period = costs.reduce if costs.slots and costs.writer == "pipelined" else costs.hop
        adder_free = not before or before[-1][3] + period <= tick
        if adder_free and len(turns) == ticket and (not turns or turns[-1] <= tick):
            part[3] = tick
            turns.append(tick + costs.hop)
            w.free_at = tick + costs.hop
            return True
    if w.started is not None and tick >= w.started + costs.compute:
        held = len(w.parts) - costs.slots  # the part whose slot this one takes over
        if (not costs.slots or held < 0
                or w.parts[held][3] is not None and w.parts[held][3] + costs.reduce <= tick):
            w.parts.append([w.cells.pop(0), w.started, tick, None])
            w.started = None
            return True
    adder_busy = w.free_at > tick or _adds_left(w)
    if w.started is None and w.cells and (costs.slots or not adder_busy):
        w.started = tick
        return True
    return False
