"""Teams, whose CTAs wait for one another: shapes that hang if a part of dq waits once too often.

A part of dq that is ready must be added before its CTA waits for anything of its team. CTAs whose
starts lie less than two q tiles apart hand their last parts on in a ring, and in a work that ends
with a batch of a single step another warpgroup has the last part.
"""

import pytest

from .support import HEAD_DIMS, Case, check, limit

pytestmark = pytest.mark.gpu

RINGS = [("shift", "full", size) for size in
         ((128, 256), (192, 384), (256, 512), (512, 1024), (320, 1024))]
SINGLE_STEPS = [("shift", "full", size) for size in ((576, 576), (576, 1024), (1056, 300))] + [
    ("symmetric_shift", "causal", size) for size in
    ((320, 320), (576, 576), (300, 700), (500, 900))]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("schedule", "mask", "size"), RINGS + SINGLE_STEPS)
@limit(20)
def test_no_part_waits_for_the_next_work(schedule, mask, size, head_dim):
    for n_q_head in (4, 12):  # 1 and 3 to a kv head; batches of a single step with 1
        check(Case(*size, mask, head_dim, n_q_head=n_q_head, n_kv_head=4, schedule=schedule))
