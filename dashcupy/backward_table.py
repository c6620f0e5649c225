"""What tells the backward kernels apart beside their tiles: one row each."""

from __future__ import annotations

from dataclasses import dataclass

_ANY_MORE = 2**31


@dataclass(frozen=True)
class BackwardKernel:
    """What plans need to know of a backward kernel; the default is one without preferences.

    Parameters
    ----------
    row_values
        Whether lse and delta come as operands of a product (``tile/row_values.cuh``).
    slots
        Parts of dq that a CTA may have under way: of ``dashcupy.simulate.Costs``.
    defines
        Its own part of the config block: names, and the fields of `BackwardConfig` they show.
    group_rows, group_heads, most_rows
        kv rows, and kv heads at least (full mask, causal mask), but no more than so many rows, of
        heads that take turns as works are handed out: `plan.head_group`.
    chunk_rows
        kv rows of them where a schedule hands out a head in chunks; more in the late ones
        (`schedules.heads_in_turn`).
    team_tiles
        Numbers of active kv tiles (full mask, causal mask) for which ``"auto"`` is a team, if it
        fills a GPU and has q tiles enough: ``shift`` or ``symmetric_shift``.
    longest_tiles
        The same for ``longest_first``, where it is no team.
    causal
        ``"auto"`` for causal masks where it is none of these.
    groups
        ``"auto"`` (full mask, causal mask) where q heads share a kv head; "": as where they do not.

    Notes
    -----
    The figures were measured on an H200 (bench/README.md).
    """

    row_values: bool = False
    slots: int = 2
    defines: tuple[tuple[str, str], ...] = ()
    group_rows: int = 2**17
    group_heads: tuple[int, int] = (16, 16)
    most_rows: int = _ANY_MORE
    chunk_rows: int = 2**14
    team_tiles: tuple[range, range] = (range(0), range(0))
    longest_tiles: range = range(0)
    causal: str = "descending"
    groups: tuple[str, str] = ("", "")


BACKWARD_TABLE = {
    # Its CTAs wait for their turn: many heads at a time shorten the queue.
    "bwd_sm80": BackwardKernel(slots=0, defines=(
        ("DC_Q_STAGES", "q_stages"), ("DC_DO_STAGES", "do_stages"), ("DC_WARPS", "n_warp"))),
    # Its dq writers wait instead, and it outruns the memory behind L2. Teams, whose kv tiles never
    # meet, where a head has kv tiles enough, but no more than two teams: what longer heads need
    # stays in L2 only if CTAs walk over the q tiles together; nor, for that, where q heads share.
    "bwd_sm90": BackwardKernel(
        row_values=True, group_rows=2**14, most_rows=2**17,
        team_tiles=(range(16, 129), range(32, 129)), longest_tiles=range(32, 257),
        groups=("ascending", "descending")),
    # A turn ends sooner when L2 holds the sum, however few heads that are. Steps are half as long,
    # so that a turn takes almost two of them; kv tiles of shortest_first begin two q tiles apart,
    # and where heads take turns those of a chunk begin later, too.
    "bwd_sm90_d64": BackwardKernel(
        group_rows=2**15, group_heads=(3, 1), most_rows=2**16, chunk_rows=3 * 2**14,
        longest_tiles=range(48, 257), causal="shortest_first", groups=("", "descending")),
    # Its softmax warps wait for turns as well, but a turn takes less than a step. Small teams idle
    # little in their last round, whatever the number of heads. Below 28 kv tiles the blocks of
    # longest_first are too short.
    "bwd_sm90_d192": BackwardKernel(
        slots=1, group_rows=2**14, group_heads=(2, 1), most_rows=2**15,
        team_tiles=(range(0), range(4, 25)), longest_tiles=range(28, 257),
        causal="shortest_first", groups=("", "descending")),
    # Of long heads one is in flight, or two where works are uneven. Teams where a head has kv tiles
    # enough and one team, or two, hold all of it.
    "bwd_sm90_d256": BackwardKernel(
        group_rows=2**14, group_heads=(1, 2), team_tiles=(range(16, 129), range(0)),
        longest_tiles=range(36, 257), causal="shortest_first",
        groups=("ascending", "descending")),
}
