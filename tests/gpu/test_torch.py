"""Differentiable attention on a GPU: streams, graphs, compilation, devices, memory, models."""

import copy

from .support import (
    DEVICE,
    NAMES,
    SCHEDULED,
    Case,
    backward,
    expect_same_bits,
    expect_same_bits_on_gpu_1,
    limit,
    run,
    torch,
    two_gpus,
)

# After support, which skips this file where there is no PyTorch.
import dashcupy.torch
import pytest
from dashcupy import env
from dashcupy.problem import CAUSAL_OF_MASK
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

CASE = Case(200, 333, "causal", batch=2, n_q_head=4, n_kv_head=2)
GRADS = ("out", "dq", "dk", "dv")
_SLOW = 200_000_000  # cycles: some 100 ms, far longer than a call
no_debug = pytest.mark.skipif(
    env.debug(), reason="debug builds wait for the GPU, which no graph allows")


def attention(case, q, k, v):
    return dashcupy.torch.attention(q, k, v, causal=CAUSAL_OF_MASK[case.mask],
                                    schedule=case.schedule)


def differentiated(case, inputs, function=attention):
    """out and the gradients of a function of a case, q, k and v."""
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
    out = function(case, q, k, v)
    out.backward(inputs["dout"])
    return dict(zip(GRADS, (out.detach(), q.grad, k.grad, v.grad)))


def without_lse(results):
    return {name: results[name] for name in GRADS}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("schedule, mask", SCHEDULED)
def test_bits_are_those_of_the_functions_of_arrays(schedule, mask, head_dim):
    # A schedule, mask or scale that does not reach the backward.
    case = CASE.replace(schedule=schedule, mask=mask, head_dim=head_dim, q_len=500, kv_len=700)
    inputs = case.draw()
    expect_same_bits(differentiated(case, inputs), without_lse(run(case, inputs)), schedule)


@pytest.mark.parametrize("change", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: x[..., :1].expand_as(x),
], ids=["transposed", "strided rows", "stride 0"])
def test_strides(change):
    # What the kernels cannot read is copied, dout of a sum above all.
    inputs = {name: change(x) for name, x in CASE.draw().items()}
    plain = {name: x.contiguous() for name, x in inputs.items()}
    expect_same_bits(differentiated(CASE, inputs), without_lse(run(CASE, plain)), "strides")
    q, k, v = (plain[name].requires_grad_() for name in "qkv")
    attention(CASE, q, k, v).sum().backward()
    ones = {"q": q, "k": k, "v": v, "dout": torch.ones_like(q)}
    expect_same_bits({"dk": k.grad}, {"dk": differentiated(CASE, ones)["dk"]}, "sum")


def test_packed_gradients():
    inputs = CASE.replace(kv_len=200, n_kv_head=4).draw()
    expected = differentiated(CASE, inputs)
    qkv = torch.stack([inputs[name] for name in "qkv"], 2).requires_grad_()
    out = dashcupy.torch.flash_attn_qkvpacked_func(qkv, causal=True)
    grads, = torch.autograd.grad(out, qkv, inputs["dout"])
    expect_same_bits(dict(zip(GRADS, (out.detach(), *grads.unbind(2)))), expected, "packed")


def test_another_stream():
    # Autograd's own thread must launch on the stream of the forward, which fills inputs late.
    inputs = CASE.draw()
    expected = differentiated(CASE, inputs)
    late = {name: torch.full_like(x, float("nan")) for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        warm = [x.clone() for x in differentiated(CASE, inputs).values()]
        del warm  # memory for what follows: an allocation may wait for the GPU
        torch.cuda._sleep(_SLOW)
        for name, x in late.items():
            x.copy_(inputs[name])
        got = {name: x.clone() for name, x in differentiated(CASE, late).items()}
    assert not stream.query(), "the producer was too quick: nothing was tested"
    stream.synchronize()
    expect_same_bits(got, expected, "stream")


class Block(torch.nn.Module):
    """A projection, attention, and a projection back."""

    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(256, 3 * 256)
        self.back = torch.nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 4, 64)).unbind(2)
        return self.back(dashcupy.torch.attention(q, k, v, causal=True).flatten(-2))


def _trainer():
    torch.manual_seed(0)
    block = Block().to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.SGD(block.parameters(), lr=4.0)
    x, y = torch.randn(2, 2, 300, 256, device=DEVICE).bfloat16()

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (block(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return block, step


def _error(x, expected):
    """Norm of the difference, as a part of the expected norm."""
    return float((x.float() - expected.float()).norm() / expected.float().norm())


def _parameters(block):
    return {name: x.detach().clone() for name, x in block.named_parameters()}


@no_debug
def test_graph_of_a_whole_training_step():
    # Results or workspace in memory that the graph does not own; a wait inside the capture.
    eager, step = _trainer()
    for _ in range(7):
        step()
    captured, step = _trainer()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        graph.replay()
        torch.full((1 << 24,), float("nan"), device=DEVICE)  # into memory that is free
    torch.cuda.synchronize()
    expect_same_bits(_parameters(captured), _parameters(eager), "graph")


@limit(180)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    function = torch.compile(lambda q, k, v: attention(CASE, q * 2, k, v) + 1, fullgraph=True,
                             dynamic=dynamic, backend="aot_eager")
    for q_len in (200, 264):
        inputs = CASE.replace(q_len=q_len).draw()
        expect_same_bits(differentiated(CASE, inputs, lambda case, q, k, v: function(q, k, v)),
                         differentiated(CASE, inputs, lambda case, q, k, v: attention(
                             case, q * 2, k, v) + 1), f"compiled, {q_len} rows")


@no_debug
@limit(180)
def test_compiled_training_step_with_graphs():
    # The compiler's own graphs, its memory plan, and kernels that it fuses around ours.
    pytest.importorskip("triton")
    block, _ = _trainer()
    x = torch.randn(2, 300, 256, device=DEVICE, dtype=torch.bfloat16)
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    found = []
    for _ in range(4):
        block.zero_grad(set_to_none=True)
        compiled(x).float().square().mean().backward()
        found.append({name: p.grad.clone() for name, p in block.named_parameters()})
    block.zero_grad(set_to_none=True)
    block(x).float().square().mean().backward()
    expect_same_bits(found[3], found[2], "two replays")
    for name, p in block.named_parameters():
        assert _error(found[3][name], p.grad) < 2e-2, name  # fused operations round less often


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    inputs = CASE.draw()

    def function(case, q, k, v):
        return checkpoint(attention, case, q, k, v, use_reentrant=reentrant)

    expect_same_bits(differentiated(CASE, inputs, function), differentiated(CASE, inputs),
                     "checkpoint")


def test_autocast_and_function_transforms():
    inputs = CASE.draw()
    q, k, v = (inputs[name] for name in "qkv")
    expected = run(CASE, inputs)
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(CASE, q.float(), k.float(), v.float())
    expect_same_bits({"out": out}, {"out": expected["out"]}, "autocast")

    def loss(q, k, v, dout):
        return (attention(CASE, q, k, v).float() * dout.float()).sum()

    single = [x[:, None] for x in (q, k, v, inputs["dout"])]  # the batch as the axis of vmap
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*single)
    expect_same_bits(dict(zip(GRADS[1:], (x[:, 0] for x in grads))),
                     {name: expected[name] for name in GRADS[1:]}, "vmap of grad")


@two_gpus
def test_second_gpu():
    # The device of the tensors and its stream, not the current one, also in autograd's thread.
    expect_same_bits_on_gpu_1(lambda x: differentiated(CASE, x), CASE.draw())


def _peak_bytes(function, inputs):
    """Device memory of forward and backward beside the inputs."""
    arrays = [inputs[name].requires_grad_() for name in "qkv"]
    for _ in range(2):  # the first time compiles and allocates what stays
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(*arrays), arrays, inputs["dout"])
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_that_of_flash_attention():
    # A copy of any of q, k, v, out, dout and the gradients is 64 MiB here.
    case = Case(16384, 16384, "causal", 128, n_q_head=16, n_kv_head=16)
    inputs = case.draw()

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *[x.transpose(1, 2) for x in (q, k, v)], is_causal=True).transpose(1, 2)

    ours = _peak_bytes(lambda *x: attention(case, *x), inputs)
    theirs = _peak_bytes(flash, inputs)
    assert ours <= 1.05 * theirs, f"{ours >> 20} MiB against {theirs >> 20} MiB"


def test_model_of_transformers():
    # Views of [batch, heads, len, head_dim], GQA, and autograd through a whole model.
    transformers = pytest.importorskip("transformers")
    dashcupy.torch.register_transformers()
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="dashcupy").to(DEVICE, torch.bfloat16)
    tokens = torch.randint(128, (2, 300), device=DEVICE)

    def results(model):
        model.zero_grad()
        found = model(input_ids=tokens, labels=tokens)
        found.loss.backward()
        return {"logits": found.logits.detach()} | {
            name: x.grad.clone() for name, x in model.named_parameters()}

    first, second = results(model), results(model)
    expect_same_bits(first, second, "two steps of a model")
    model.set_attn_implementation("sdpa")
    yardstick, exact = results(model), results(copy.deepcopy(model).float())
    for name, x in exact.items():
        ours, theirs = _error(first[name], x), _error(yardstick[name], x)
        assert ours < 2 * theirs, f"{name}: relative error {ours:.3g}, with sdpa {theirs:.3g}"


def test_second_call_of_the_backward():
    # The saved tensors of a graph that is kept serve again, with the same bits.
    inputs = CASE.draw()
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    out, lse = dashcupy.torch.attention(q, k, v, causal=True, return_lse=True)
    first = torch.autograd.grad(out, (q, k, v), inputs["dout"], retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), inputs["dout"])
    expected = backward(CASE, inputs, out.detach(), lse)
    for grads in (first, second):
        expect_same_bits(dict(zip(NAMES[2:], grads)), dict(zip(NAMES[2:], expected)), "again")
