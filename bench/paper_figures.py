"""Figures of the DASH authors: backward TFLOP/s on an H800, FlashAttention-3 with their schedules.

Source: the plot script of their code (github.com/SJTU-Liquid/deterministic-FA3); the largest ratio
in it is the 1.28 of the paper (arXiv 2601.21824). bfloat16, 16,384 tokens, hidden size 2048, CUDA
12.6, times of the whole backward.
"""

DEVICE = "NVIDIA H800"
LARGEST_COST = 0.379  # of FlashAttention-3's throughput that determinism takes, says the paper

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# A row of five for each length: baseline, descending, descending in a persistent kernel, shift
# (symmetric shift with the causal mask), the same in a persistent kernel.
_TABLES = {
    (64, False): ((242.8, 247.4, 283.9, 263.4, 275.6), (307.5, 307.6, 302.4, 345.3, 367.8),
                  (353.4, 357.2, 321.3, 415.9, 431.2), (397.2, 402.1, 354.4, 466.2, 479.9),
                  (449.2, 453.2, 414.0, 493.4, 499.0), (507.9, 515.2, 514.1, 499.3, 501.0)),
    (64, True): ((150.7, 147.6, 159.8, 162.6, 159.9), (243.4, 236.5, 237.1, 245.1, 250.5),
                 (334.4, 329.8, 296.5, 334.1, 336.9), (393.7, 398.4, 352.2, 399.5, 403.8),
                 (432.8, 442.2, 374.5, 438.5, 442.0), (450.4, 462.7, 383.3, 457.3, 458.1)),
    (128, False): ((260.2, 263.0, 276.1, 260.9, 265.7), (366.1, 363.2, 357.9, 379.5, 380.1),
                   (432.9, 435.5, 402.8, 471.1, 463.4), (495.2, 494.5, 464.3, 527.0, 522.9),
                   (560.0, 548.4, 551.6, 560.5, 556.7), (580.0, 583.2, 574.5, 563.5, 556.8)),
    (128, True): ((160.4, 162.0, 155.3, 160.4, 155.1), (241.9, 253.1, 254.1, 252.2, 248.8),
                  (311.4, 357.3, 340.0, 335.2, 341.3), (360.8, 435.6, 395.6, 400.3, 409.6),
                  (388.5, 489.1, 463.5, 439.5, 451.3), (398.5, 511.6, 496.2, 463.4, 473.5)),
}


def tflops(head_dim: int, causal: bool, seqlen: int) -> dict[str, float]:
    """TFLOP/s of one configuration by our names of the schedules, the better kernel of each."""
    base, descending, descending_2, shift, shift_2 = (
        _TABLES[head_dim, causal][_LENGTHS.index(seqlen)])
    return {"ascending": base, "descending": max(descending, descending_2),
            "symmetric_shift" if causal else "shift": max(shift, shift_2)}
