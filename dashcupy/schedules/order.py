"""The one order in which CTAs take the works of all heads, whatever the schedule.

Heads go in groups. The works of a group are numbered chunk by chunk: chunk 0 of every head, then
chunk 1 of every head, and so on; inside a chunk head by head, inside a head in the order of the
schedule. A CTA takes the next number from a counter, so a work starts only after all lower numbers
have started. The same arithmetic stands in ``cuda_src/schedules/contract.cuh``.
"""

from __future__ import annotations

from .contract import Schedule
from .shape import Shape

# Most works that may wait for one another. Larger teams need more resident CTAs than small GPUs
# or a shared GPU have; smaller ones cut a head into more chunks, each of which starts late.
MAX_TEAM = 64


def balanced_chunk(count: int) -> int:
    """Size of the chunks when ``count`` works are cut into the fewest, nearly equal teams."""
    n_chunk = -(-count // MAX_TEAM)
    return -(-count // n_chunk) if n_chunk else 1


def total_work(schedule: Schedule, shape: Shape, n_head: int) -> int:
    """Works of all heads."""
    return n_head * schedule.num_work(shape)


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
        Heads whose works are handed out together, 1 .. ``n_head`` (the default: all of them).

    Returns
    -------
    tuple of int
        ``(head, work)`` with ``head = batch * n_kv_head + kv_head``.
    """
    n_work, chunk = schedule.num_work(shape), schedule.chunk_size(shape)
    head_group = n_head if head_group is None else head_group
    group, number = divmod(global_work, head_group * n_work)
    first_head = group * head_group
    n_group = min(head_group, n_head - first_head)
    n_full = n_work // chunk
    in_full = n_full * chunk * n_group
    if number < in_full:
        chunk_index, rest = divmod(number, chunk * n_group)
        head, work = divmod(rest, chunk)
        return first_head + head, chunk_index * chunk + work
    head, work = divmod(number - in_full, n_work - n_full * chunk)
    return first_head + head, n_full * chunk + work
