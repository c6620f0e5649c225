"""Models of Transformers, built from small configurations: right, trainable, or refused."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

import dashcupy.torch  # noqa: E402
from dashcupy.errors import UnsupportedError  # noqa: E402

LENGTH = 17
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ONES = torch.ones(2, LENGTH, dtype=torch.long)
PADDED = ONES.clone()
PADDED[0, :3] = 0  # on the left
RESTARTED = torch.cat((torch.arange(8), torch.arange(LENGTH - 8)))[None]


def model(kind="Llama", **changes):
    """A small model with the attention of dashcupy."""
    dashcupy.torch.register_transformers()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dashcupy")


def tokens(length=LENGTH):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0))


def results(net, **inputs):
    """Logits, and all gradients of the loss."""
    net.zero_grad()
    found = net(input_ids=tokens(), labels=tokens(), **inputs)
    found.loss.backward()
    return [found.logits.detach(), *(x.grad.clone() for x in net.parameters())]


@pytest.mark.parametrize("kind, inputs", [
    ("Llama", {}), ("Llama", {"attention_mask": ONES}), ("Qwen3", {"use_cache": False}),
    ("Mistral", {"use_cache": False})])
def test_logits_and_gradients_are_those_of_sdpa(kind, inputs):
    """Mistral: a sliding window that is as long as the sequence hides nothing."""
    net = model(kind, **({"sliding_window": LENGTH} if kind == "Mistral" else {}))
    found = results(net, **inputs)
    net.set_attn_implementation("sdpa")
    for x, y in zip(found, results(net, **inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_training_gives_equal_bits_and_a_smaller_loss():
    def train():
        net = model("Qwen3")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(net(input_ids=tokens(), labels=tokens()).loss)
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach(), list(net.parameters())

    (losses, parameters), (again, repeated) = train(), train()
    assert losses[-1] < losses[0] and torch.equal(losses, again)
    assert all(torch.equal(x, y) for x, y in zip(parameters, repeated, strict=True))


def test_schedule_of_the_registration_reaches_the_backward(monkeypatch):
    from dashcupy import call
    seen = []
    run = call.run
    monkeypatch.setattr(call, "run", lambda direction, *arguments, **options: (
        seen.append((direction, options.get("schedule"))) or run(direction, *arguments, **options)))
    dashcupy.torch.register_transformers("dashcupy_shortest", schedule="shortest_first")
    net = model()
    net.set_attn_implementation("dashcupy_shortest")
    results(net)
    assert seen.count(("backward", "shortest_first")) == SIZES["num_hidden_layers"]


def test_generation_with_a_growing_cache():
    """One row at the end of many keys, and several rows after cached ones: aligned to the last."""
    net = model().eval()
    whole = net(input_ids=tokens()).logits
    first = net(input_ids=tokens()[:, :9], use_cache=True)
    second = net(input_ids=tokens()[:, 9:16], cache=first.past_key_values)
    last = net(input_ids=tokens()[:, 16:], cache=second.past_key_values)
    torch.testing.assert_close(torch.cat((first.logits, second.logits, last.logits), 1), whole,
                               rtol=1e-4, atol=1e-6)
    options = {"attention_mask": ONES, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = net.generate(tokens(), **options)
    net.set_attn_implementation("sdpa")
    assert torch.equal(found, net.generate(tokens(), **options))


@pytest.mark.parametrize("inputs, words", [
    ({"attention_mask": PADDED}, "padded batches"),
    ({"attention_mask": PADDED.flip(1)}, "padded batches"),
    ({"attention_mask": ONES[:, :-1]}, "padded batches"),
    ({"attention_mask": ONES[:, None, :, None].expand(2, 1, LENGTH, LENGTH).tril().bool()},
     "attention_mask is a tensor"),
    ({"position_ids": RESTARTED, "use_cache": False}, "packed sequences"),
    ({"position_ids": RESTARTED, "use_cache": True}, "packed sequences"),
    ({"cu_seq_lens_q": torch.tensor([0, 8, LENGTH]), "use_cache": False}, "cu_seq_lens_q"),
    ({"output_attentions": True}, "output_attentions"),
    ({"block_indices": torch.zeros(1, 2, LENGTH, 1)}, "block_indices is a tensor"),
    ({"indices": torch.zeros(1, LENGTH, 4)}, "indices is a tensor"),
    ({"sinks": torch.zeros(4)}, "sinks is a tensor"),
], ids=["left", "right", "short", "own mask", "positions", "positions, cache", "cu_seq_lens",
        "weights", "blocks of an indexer", "keys of an indexer", "sinks"])
def test_batches_that_cannot_be_computed_are_refused(inputs, words):
    with pytest.raises(UnsupportedError, match=words):
        model()(input_ids=tokens(), **inputs)


@pytest.mark.parametrize("kind, changes, words", [
    ("Mistral", {"sliding_window": 8}, "window or chunks of 8"),
    ("Gemma2", {"sliding_window": 64, "head_dim": 16, "attn_logit_softcapping": 50.0},
     "softcap is 50.0"),
    ("GptOss", {"sliding_window": 64, "head_dim": 16, "num_local_experts": 2}, "s_aux is a tensor"),
    ("Llama", {"attention_dropout": 0.1}, "dropout is 0.1"),
])
def test_models_that_cannot_be_computed_are_refused(kind, changes, words):
    net = model(kind, **changes).train()
    with pytest.raises(UnsupportedError, match=words):
        net(input_ids=tokens(), use_cache=False)


@pytest.mark.parametrize("kind, changes", [
    ("Bloom", {"n_layer": 1, "n_head": 4}), ("XGLM", {"d_model": 64, "attention_heads": 4,
                                                      "num_layers": 1, "ffn_dim": 96})])
def test_models_with_an_attention_of_their_own_are_refused(kind, changes):
    """They never call ours: without a mask to read they would see the tokens to come."""
    with pytest.raises(UnsupportedError, match="an attention of its own"):
        model(kind, **changes)(input_ids=tokens())


def test_causal_mask_counts_where_the_module_says_it_is_not_causal():
    net = model("BigBirdPegasus", d_model=64, decoder_layers=1, decoder_attention_heads=4,
                decoder_ffn_dim=96, dropout=0.0, num_hidden_layers=1).eval()
    whole = net(input_ids=tokens()).logits
    torch.testing.assert_close(net(input_ids=tokens()[:, :9]).logits, whole[:, :9])


def test_what_stands_for_a_causal_mask_can_be_moved_and_copied_by_libraries():
    mask = dashcupy.torch.transformers._CausalMask()
    assert not hasattr(mask, "to") and type(copy.deepcopy(mask)) is type(mask)
    with pytest.raises(UnsupportedError, match="an attention of its own"):
        torch.zeros(1) + mask


def test_sliding_window_is_refused_where_generation_outgrows_it():
    net = model("Mistral", sliding_window=LENGTH + 1).eval()
    with pytest.raises(UnsupportedError, match=f"window or chunks of {LENGTH + 1}"):
        net.generate(tokens(), attention_mask=ONES, max_new_tokens=4, do_sample=False,
                     pad_token_id=0)


def test_static_cache_is_refused():
    with pytest.raises(UnsupportedError, match="static cache"):
        model().eval().generate(tokens(), attention_mask=ONES, max_new_tokens=4, do_sample=False,
                                cache_implementation="static", pad_token_id=0)


def test_compiled_model_is_right_and_refuses_while_it_runs():
    """The compiler cannot look at masks and positions, so the graph must."""
    net = model()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = net(input_ids=tokens(), use_cache=False).logits
    for inputs in ({}, {"attention_mask": ONES}):
        found = compiled(input_ids=tokens(), use_cache=False, **inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for inputs, words in (({"attention_mask": PADDED}, "padded batches"),
                          ({"position_ids": RESTARTED}, "packed sequences")):
        with pytest.raises(RuntimeError, match=words):
            compiled(input_ids=tokens(), use_cache=False, **inputs)


def test_positions_are_looked_at_again_when_written():
    """A static input of a training loop holds another batch at every step."""
    net, positions = model(), torch.arange(LENGTH)[None].clone()
    net(input_ids=tokens(), position_ids=positions, use_cache=True)
    positions.copy_(RESTARTED)
    with pytest.raises(UnsupportedError, match="packed sequences"):
        net(input_ids=tokens(), position_ids=positions, use_cache=True)
