"""The one order in which CTAs take the works of all heads, whatever the schedule.

Works are numbered chunk by chunk: chunk 0 of every head, then chunk 1 of every head, and so on.
In a chunk a group of heads takes turns, work by work in the order of the schedule, then the next
group; in a late chunk the groups are larger, and a team, which must run together, has its head
alone. A CTA takes the next number from a counter, so a work starts only after all lower numbers
have started. The same arithmetic stands in ``cuda_src/schedules/contract.cuh``.
"""

from __future__ import annotations

from .contract import Schedule
from .shape import Shape

# Most works that may wait for one another. Larger teams need more resident CTAs than small GPUs
# or a shared GPU have; smaller ones cut a head into more chunks, each of which starts late.
MAX_TEAM = 64
LATE_HEADS = 3  # see `heads_in_turn`


def balanced_chunk(count: int) -> int:
    """Size of the chunks when ``count`` works are cut into the fewest, nearly equal teams."""
    n_chunk = -(-count // MAX_TEAM)
    return -(-count // n_chunk) if n_chunk else 1


def total_work(schedule: Schedule, shape: Shape, n_head: int) -> int:
    """Works of all heads."""
    return n_head * schedule.num_work(shape)


def heads_in_turn(schedule: Schedule, shape: Shape, n_head: int, head_group: int,
                  first: int = 0) -> int:
    """Heads that take turns in the chunk that begins with work ``first``.

    A team has its head alone: works of other heads in between would take the CTAs that it waits
    for. In a chunk that begins in the second half of the works `LATE_HEADS` times ``head_group``
    do, but no more than a third of all heads where ``head_group`` is less. With as many keys as q
    rows late works are short: they follow one another closely and would queue, and the few rows in
    flight leave L2 room for more heads. With all heads at a time they would catch up with the
    chunk before.
    """
    if schedule.team_size(shape) > 1:
        return 1
    if first == 0 or 2 * first < schedule.num_work(shape):
        return head_group
    return max(head_group, min(LATE_HEADS * head_group, n_head // 3))


def decode(schedule: Schedule, shape: Shape, n_head: int, global_work: int,
           head_group: int | None = None) -> tuple[int, int]:
    """Head and work behind a number of the global order.

    Parameters
    ----------
    n_head
        kv heads of the whole batch.
    global_work
        0 .. ``total_work`` - 1.
    head_group
        Heads that take turns, 1 .. ``n_head`` (the default: all of them), but for late chunks and
        teams: `heads_in_turn`.

    Returns
    -------
    tuple of int
        ``(head, work)`` with ``head = batch * n_kv_head + kv_head``.
    """
    chunk = schedule.chunk_size(shape)
    first = global_work // (chunk * n_head) * chunk  # work of the chunk
    count = min(chunk, schedule.num_work(shape) - first)
    number = global_work - first * n_head
    in_turn = heads_in_turn(schedule, shape, n_head,
                            n_head if head_group is None else head_group, first)
    first_head = number // (count * in_turn) * in_turn  # of those that take turns
    turn, head = divmod(number - first_head * count, min(in_turn, n_head - first_head))
    return first_head + head, first + turn
