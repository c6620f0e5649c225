"""Small shapes that the schedule tests share: every way a tile can be cut or hidden."""

from dashcupy.schedules import Shape

# (q rows, kv rows): stride 1, 2, 3, q tiles larger than kv tiles, and neither a multiple.
TILES = ((4, 4), (4, 8), (4, 12), (8, 4), (6, 4))
# More kv tiles than one team holds, more or fewer of them than q tiles; in q and kv tiles.
MANY_TILES = ((130, 130), (40, 131), (300, 150), (64, 32), (66, 33), (96, 48))


def shapes(q_rows, kv_rows, causal):
    """Shapes of one tile size: lengths around one tile and of several, all offsets."""
    for q_len in (1, q_rows - 1, q_rows, q_rows + 1, 5 * q_rows + 1):
        for kv_len in (1, kv_rows - 1, kv_rows, kv_rows + 1, 4 * kv_rows, 7 * kv_rows - 1):
            # Bottom-right (negative where q is longer), top-left, and rows that see nothing.
            for offset in (kv_len - q_len, 0, -5) if causal else (0,):
                yield Shape(q_len, kv_len, q_rows, kv_rows, causal, offset)
    yield Shape(0, kv_rows, q_rows, kv_rows, causal)
    yield Shape(q_rows, 0, q_rows, kv_rows, causal)


def large_shapes(causal):
    """Heads that need several teams."""
    for n_q, n_kv in MANY_TILES:
        offset = 2 * n_kv - n_q if causal else 0
        yield Shape(n_q, 2 * n_kv, 1, 2, causal, offset)


def all_shapes(masks):
    """Every shape of the grid that a schedule with these masks is defined for."""
    for mask in masks:
        for q_rows, kv_rows in TILES:
            yield from shapes(q_rows, kv_rows, mask == "causal")
        yield from large_shapes(mask == "causal")
