"""Sums follow the schedule: the order is read out of device code, and proved by the bits of dq."""

import itertools

import dashcupy
import numpy as np
import pytest
from dashcupy import schedules
from dashcupy.problem import CAUSAL_OF_MASK
from dashcupy.schedules import Shape

from . import kernels
from .support import DEVICE, HEAD_DIMS, SCHEDULED, Case, bits, torch

pytestmark = pytest.mark.gpu

Q_TILE, KV_TILE, N_HEAD = 64, 128, 13
HEAD_GROUPS = (1, 2, 3, N_HEAD)

# One thread a shape writes all that the schedule says about it, in the order of `_expected`.
_PROBE = """
#include DC_SCHEDULE

extern "C" __global__ void probe(const int* shapes, const int* starts, int* to, int n_shape,
                                 int n_head) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n_shape) return;
  const schedule::Shape shape =
      schedule::make_shape(shapes[3 * i], shapes[3 * i + 1], shapes[3 * i + 2]);
  to += starts[i];
  *to++ = shape.n_q;
  *to++ = shape.n_kv;
  *to++ = schedule::num_work(shape);
  *to++ = schedule::team_size(shape);
  *to++ = schedule::chunk_size(shape);
  for (int kv_tile = 0; kv_tile < shape.n_kv; ++kv_tile) {
    const int n_step = schedule::num_steps(shape, kv_tile);
    *to++ = n_step;
    for (int step = 0; step < n_step; ++step) {
      const int q_tile = schedule::q_tile(shape, kv_tile, step);
      *to++ = q_tile;
      *to++ = schedule::ticket(shape, kv_tile, q_tile);
    }
  }
  for (int q_tile = 0; q_tile < shape.n_q; ++q_tile)
    *to++ = schedule::num_contributors(shape, q_tile);
  for (int work = 0; work < schedule::num_work(shape); ++work) {
    const int size = schedule::work_size(shape, work);
    *to++ = size;
    for (int part = 0; part < size; ++part) *to++ = schedule::kv_tile(shape, work, part);
  }
  const int head_groups[] = {1, 2, 3, n_head};
  for (const int head_group : head_groups)
    for (int number = 0; number < n_head * schedule::num_work(shape); ++number) {
      const schedule::HeadWork place = schedule::decode(shape, n_head, head_group, number);
      *to++ = place.head;
      *to++ = place.work;
    }
}
"""


def _expected(schedule, shape: Shape) -> list[int]:
    found = [shape.n_q, shape.n_kv, schedule.num_work(shape), schedule.team_size(shape),
             schedule.chunk_size(shape)]
    for kv_tile in range(shape.n_kv):
        n_step = schedule.num_steps(shape, kv_tile)
        found.append(n_step)
        for step in range(n_step):
            q_tile = schedule.q_tile(shape, kv_tile, step)
            found += [q_tile, schedule.ticket(shape, kv_tile, q_tile)]
    found += [schedule.num_contributors(shape, q_tile) for q_tile in range(shape.n_q)]
    for work in range(schedule.num_work(shape)):
        size = schedule.work_size(shape, work)
        found += [size, *(schedule.kv_tile(shape, work, part) for part in range(size))]
    for head_group in HEAD_GROUPS:
        for number in range(schedules.total_work(schedule, shape, N_HEAD)):
            found += schedules.decode(schedule, shape, N_HEAD, number, head_group)
    return found


@pytest.mark.parametrize(("name", "mask"), SCHEDULED)
def test_device_code_follows_the_model(name, mask):
    # Python and CUDA that drifted apart, or integer arithmetic that the device compiler gets wrong.
    lengths = [(q_len, kv_len) for q_len in (0, 1, 64, 65, 200, 1000)
               for kv_len in (0, 1, 128, 129, 700)]
    lengths += [(300, 9000), (9000, 300), (8320, 16640)]  # heads of several teams
    offsets = {"full": [lambda q_len, kv_len: 0],
               "causal": [lambda q_len, kv_len: 0, lambda q_len, kv_len: kv_len - q_len]}[mask]
    shapes = [Shape(q_len, kv_len, Q_TILE, KV_TILE, mask == "causal", offset(q_len, kv_len))
              for q_len, kv_len in lengths for offset in offsets]
    expected = [_expected(schedules.get(name), shape) for shape in shapes]
    starts = np.cumsum([0, *map(len, expected)])
    to = torch.full((int(starts[-1]),), -7, dtype=torch.int32, device=DEVICE)
    given = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (
        [(shape.q_len, shape.kv_len, shape.offset) for shape in shapes], starts[:-1].tolist())]
    probe = kernels.load("probe", _PROBE, {
        "DC_Q_TILE": Q_TILE, "DC_KV_TILE": KV_TILE, "DC_CAUSAL": int(mask == "causal"),
        "DC_SCHEDULE": f"schedules/{name}.cuh"})
    probe((len(shapes) // 32 + 1,), (32,), (
        *(np.uint64(x.data_ptr()) for x in (*given, to)), np.int32(len(shapes)),
        np.int32(N_HEAD)))
    torch.cuda.synchronize()
    got = to.cpu().numpy()
    for shape, start, values in zip(shapes, starts, expected):
        found = got[start:start + len(values)].tolist()
        assert found == values, f"{name}, {shape}: first difference at entry " \
            f"{next(i for i, pair in enumerate(zip(found, values)) if len(set(pair)) > 1)}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dq_is_summed_in_ticket_order(mask, head_dim):
    # Tickets that are computed and not obeyed: dq is then right, but its bits are those of another
    # order. Inputs are such that each kv tile's part of dq is known exactly, and sums of parts
    # round differently in every order.
    case = Case(8, 8, mask, head_dim, n_q_head=1, n_kv_head=1)
    length = 11 * _shape(case, case.draw()).kv_rows - 8
    case = case.replace(q_len=length, kv_len=length)
    sums = {name: expect_ticket_order(case.replace(schedule=name))
            for name, of in SCHEDULED if of == mask}
    # The test can tell these orders apart.
    others = {"full": ("shift",), "causal": ("symmetric_shift", "longest_first")}[mask]
    for a, b in itertools.combinations(("ascending", "shortest_first", *others), 2):
        share = float((bits(sums[a]) != bits(sums[b])).float().mean())
        assert share > 0.05, f"{a} and {b} differ in {share:.1%} of dq"


def expect_ticket_order(case: Case) -> torch.Tensor:
    """Fail unless dq of a case of one head is summed in ticket order; returns that sum."""
    inputs, shape = _exact_inputs(case)
    q = inputs["q"]
    lse = torch.zeros(1, 1, case.q_len, device=DEVICE)
    dq, _, _ = dashcupy.attention_backward(
        inputs["dout"], q, inputs["k"], inputs["v"], torch.zeros_like(q), lse,
        causal=CAUSAL_OF_MASK[case.mask], scale=1.0, schedule=case.schedule)
    expected = _sum_in_ticket_order(schedules.get(case.schedule), shape, inputs)
    different = bits(dq[0, :, 0]).cpu() != bits(expected)
    assert not different.any(), \
        f"{case}: {int(different.sum())} of {different.numel()} elements of dq, first at " \
        f"{different.nonzero()[0].tolist()}"
    return expected


def _exact_inputs(case: Case):
    """Inputs for which P is 1, dS has one nonzero entry a kv tile and row, and dq_part is exact.

    q = 0 and lse = 0 give P = exp(0) = 1; out = 0 gives delta = 0; row i of dout is the unit vector
    of column i mod head_dim, so dS[i, j] = v[j, i mod head_dim], which is 0 but for the first key
    of a kv tile. The parts of kv tiles 0 and 1 are 2**20 times larger than the others and cancel:
    those that come before or between them lose their low bits, those that come after do not.
    """
    inputs = case.draw()
    shape = _shape(case, inputs)
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.rand(shape.n_kv, case.head_dim, generator=generator) + 1 for _ in "kv")
    k *= torch.randint(0, 2, k.shape, generator=generator) * 2 - 1
    k[0] *= 2**20
    if shape.n_kv > 1:
        k[1], v[1] = -k[0], v[0]
    dout = torch.zeros_like(inputs["dout"])
    rows = torch.arange(case.q_len, device=DEVICE)
    dout[0, rows, 0, rows % case.head_dim] = 1
    inputs["v"].zero_()
    inputs["v"][0, ::shape.kv_rows, 0] = v.to(DEVICE, torch.bfloat16)
    inputs["k"][0, ::shape.kv_rows, 0] = k.to(DEVICE, torch.bfloat16)
    return inputs | {"q": torch.zeros_like(inputs["q"]), "dout": dout}, shape


def _shape(case: Case, inputs: dict) -> Shape:
    return dashcupy.attention_plan(inputs["q"], inputs["k"], inputs["v"],
                                   causal=CAUSAL_OF_MASK[case.mask], schedule=case.schedule).shape


def _sum_in_ticket_order(schedule, shape: Shape, inputs: dict) -> torch.Tensor:
    """dq [q_len, head_dim] on the CPU, added in float32 one kv tile after another."""
    k, v = (inputs[name][0, ::shape.kv_rows, 0].cpu().float() for name in ("k", "v"))
    dq = torch.zeros(shape.q_len, k.shape[1])
    for q_tile in range(shape.n_q):
        rows = torch.arange(q_tile * shape.q_rows, min((q_tile + 1) * shape.q_rows, shape.q_len))
        order = sorted(range(schedule.num_contributors(shape, q_tile)),
                       key=lambda kv_tile: schedule.ticket(shape, kv_tile, q_tile))
        for kv_tile in order:
            sees = ~torch.tensor(shape.causal) | (kv_tile * shape.kv_rows <= rows + shape.offset)
            weight = torch.where(sees, v[kv_tile, rows % k.shape[1]], 0.0)
            dq[rows] += weight[:, None] * k[kv_tile]
    return dq.to(torch.bfloat16)
