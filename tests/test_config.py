"""Tiles and stages: what fits, what is refused, and what they may not depend on."""

import dataclasses

import pytest

from dashcupy import cpu
from dashcupy.config import SMEM_BYTES, choose_config, head_dim_pad, max_head_dim
from dashcupy.errors import UnsupportedError
from dashcupy.problem import Problem

CAPABILITIES = sorted(SMEM_BYTES)


def problem(**changes):
    values = dict(batch=2, q_len=1000, kv_len=900, n_q_head=4, n_kv_head=2, head_dim=128,
                  dtype="bfloat16", mask="full", scale=0.1)
    return Problem(**(values | changes))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", CAPABILITIES)
def test_every_head_dim_fits_into_shared_memory(direction, target):
    """A config that asks for more than the card has fails at the first launch only."""
    for head_dim in range(8, max_head_dim(target) + 1, 8):
        config = choose_config(problem(head_dim=head_dim), direction, target)
        assert 0 < config.smem_bytes <= SMEM_BYTES[target]
        assert head_dim <= config.head_dim_pad < head_dim + 64 and config.head_dim_pad % 32 == 0
        assert config.q_tile % 16 == 0 and config.kv_tile % 16 == 0
        assert "compute capability {}.{}".format(*target) in config.reason


@pytest.mark.parametrize("head_dim, expected", [
    (8, (192, 128, 64, 4, 2, 0)), (64, (192, 128, 64, 4, 2, 0)), (72, (128, 128, 96, 2, 2, 32)),
    (104, (128, 128, 128, 2, 2, 32)), (128, (128, 128, 128, 2, 2, 32)),
    (136, (128, 96, 192, 2, 1, 0)), (200, (128, 80, 256, 2, 1, 0)), (256, (128, 80, 256, 2, 1, 0)),
])
def test_forward_tiles_of_hopper(head_dim, expected):
    """As below; and bfloat16 alone may fix its references, as float16 ends at 65504."""
    for dtype in ("bfloat16", "float16"):
        config = choose_config(problem(head_dim=head_dim, dtype=dtype), "forward", (9, 0))
        assert (config.q_tile, config.kv_tile, config.head_dim_pad, config.stages,
                config.q_stages, config.early_exponentials) == expected
        assert config.kernel == "fwd_sm90" and config.fixed_reference == (dtype == "bfloat16")
        assert config.n_warp == 4 + config.q_tile // 16


def test_forward_tiles_of_hopper_with_the_causal_mask():
    """A stage of q more, which changes no bits, and smaller q tiles over few keys, which do."""
    def tiles(head_dim, kv_len):
        config = choose_config(problem(head_dim=head_dim, kv_len=kv_len, mask="causal"),
                               "forward", (9, 0))
        return config.q_tile, config.kv_tile, config.q_stages, config.n_consumer
    assert tiles(128, 64) == tiles(128, 5000) == tiles(96, 5000) == (128, 128, 3, 2)
    assert tiles(64, 1) == tiles(64, 1024) == (128, 128, 3, 2)
    assert tiles(64, 1025) == (192, 128, 2, 3)
    assert tiles(256, 64) == (128, 80, 1, 2)


@pytest.mark.parametrize("target", [(8, 0), (8, 9), (10, 0), (12, 0), (13, 7)])
def test_other_generations_keep_the_portable_kernels(target):
    """wgmma exists on 9.0 only: newer GPUs refuse a cubin that was made for it."""
    assert choose_config(problem(), "forward", target).kernel == "fwd_sm80"
    assert choose_config(problem(), "backward", target).kernel == "bwd_sm80"


@pytest.mark.parametrize("head_dim, expected", [
    (64, ("bwd_sm90_d64", 64, 128, 64)), (72, ("bwd_sm90", 64, 128, 96)),
    (96, ("bwd_sm90", 64, 128, 96)), (104, ("bwd_sm90", 64, 128, 128)),
    (128, ("bwd_sm90", 64, 128, 128)), (136, ("bwd_sm90_d192", 64, 96, 192)),
    (192, ("bwd_sm90_d192", 64, 96, 192)), (200, ("bwd_sm90_d256", 64, 128, 256)),
    (256, ("bwd_sm90_d256", 64, 128, 256))])
def test_backward_loops_of_hopper(head_dim, expected):
    """A head_dim one step past a loop must get the next one: its columns would be cut."""
    config = choose_config(problem(head_dim=head_dim), "backward", (9, 0))
    assert (config.kernel, config.q_tile, config.kv_tile, config.head_dim_pad) == expected


@pytest.mark.parametrize("scale", [2.0**-20.01, 2.0**20.01])
def test_scales_that_row_values_cannot_have(scale):
    """They would leave float32: the portable kernel takes over. The other loops have no limit."""
    kernels = {head_dim: choose_config(problem(scale=scale, head_dim=head_dim), "backward",
                                       (9, 0)).kernel for head_dim in (64, 72, 128, 136, 200)}
    assert kernels == {64: "bwd_sm90_d64", 72: "bwd_sm80", 128: "bwd_sm80", 136: "bwd_sm90_d192",
                       200: "bwd_sm90_d256"}


def test_shared_memory_of_the_hopper_forward_by_hand():
    """head_dim 128: stages of q, k and v in rows of 256 bytes, sums, references, barriers."""
    for mask, q_stages in (("full", 2), ("causal", 3), ("causal_top_left", 3)):
        tiles = (q_stages * 128 + 4 * 128) * 256
        used = (tiles + 8 * 256 + 4 * 128 + 5 * 16
                + 8 * (4 * 2 + 2 * q_stages + 2 * q_stages + 2) + 4 * (2 * q_stages + 2))
        config = choose_config(problem(mask=mask), "forward", (9, 0))
        assert config.smem_bytes == -(-used // 1024) * 1024 <= 227 * 1024


@pytest.mark.parametrize("target, head_dim, expected", [
    ((9, 0), 64, (64, 128, 4, 4)), ((9, 0), 72, (64, 128, 2, 2)), ((9, 0), 128, (64, 128, 2, 2)),
    ((10, 0), 64, (128, 128, 2, 2)), ((10, 0), 128, (64, 128, 2, 2)),
    ((8, 0), 64, (128, 128, 1, 1)), ((8, 0), 128, (64, 128, 2, 1)),
    ((8, 9), 64, (64, 128, 1, 1)), ((8, 9), 96, (64, 64, 2, 1)), ((12, 0), 128, (64, 64, 1, 1)),
])
def test_backward_tiles(target, head_dim, expected):
    """The choice itself: bits follow from the tiles, so a change of it must be meant."""
    config = choose_config(problem(head_dim=head_dim), "backward", target)
    assert (config.q_tile, config.kv_tile, config.q_stages, config.do_stages) == expected


def test_shared_memory_of_the_backward_by_hand():
    """head_dim 128 on 10.0: rows of 272 bytes."""
    config = choose_config(problem(), "backward", (10, 0))
    k_v, q_dout, p_ds = 2 * 128 * 272, 4 * 64 * 272, 2 * 64 * 272
    assert config.smem_bytes == k_v + q_dout + p_ds + 2 * 2 * 64 * 4 + 128 * 32 + 32


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["cpu", (9, 0)])
def test_batch_and_heads_do_not_count(direction, target):
    """A config that follows the load would change bits with the batch."""
    base = choose_config(problem(), direction, target)
    assert choose_config(problem(batch=77, n_q_head=64, n_kv_head=1), direction, target) == base


def test_an_unknown_capability_gets_what_every_gpu_has():
    """A GPU of tomorrow must run, with tiles that do not depend on what it reports."""
    config = choose_config(problem(), "backward", (13, 7))
    known = choose_config(problem(), "backward", (8, 6))
    assert dataclasses.replace(config, reason="") == dataclasses.replace(known, reason="")
    assert "13.7 is not in the table" in config.reason


def test_cpu_tiles_are_the_backends():
    """The plan would name tiles that the backend does not use."""
    config = choose_config(problem(dtype="float64", head_dim=5), "backward", "cpu")
    assert (config.q_tile, config.kv_tile) == cpu.choose_tiles(problem(dtype="float64", head_dim=5))


@pytest.mark.parametrize("changes, target, message", [
    ({"head_dim": 100}, (9, 0), "head_dim=100 .* pad q, k and v with zeros to 104"),
    ({"head_dim": 256}, (8, 0), "head_dim=256 .* multiples of 8 up to 128"),
    ({"head_dim": 256}, (10, 0), "head_dim=256 .* multiples of 8 up to 128"),
    ({"head_dim": 264}, (9, 0), "head_dim=264 .*on this GPU .*of 8 up to 256"),
    ({"dtype": "float32"}, (9, 0), "float32 .*allowed: float16, bfloat16"),
    ({}, (7, 5), "compute capability 7.5; the kernels need 8.0"),
])
def test_what_no_kernel_serves_is_refused(changes, target, message):
    """Silently padding, casting or falling back to the CPU would hide it."""
    with pytest.raises(UnsupportedError, match=message):
        choose_config(problem(**changes), "forward", target)


def test_padding():
    """Tiles have whole groups of 32 columns."""
    assert [head_dim_pad(d) for d in (8, 32, 40, 64, 72, 128)] == [32, 32, 64, 64, 96, 128]
