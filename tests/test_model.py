"""model.py against transformers, family by family: case E12, and E5, E6, R3 with their neighbours."""

import dataclasses
import weakref

import pytest
import torch
from paged import run_paged
from tiny import FAMILIES, ours
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kernels.attention import PackedAttention
from kernels.logprob import Head, log_probs
from model import init_tensor, rope_tables

EXACT = pytest.mark.parametrize("exact", [False, True], ids=["sdpa", "exact"])
FAMILY = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = [9, 5, 14, 5, 1, 22]  # two of equal length share one attention call, one is a single token, one exceeds a key block


def random_ids(lengths: list[int], vocab: int = 64, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]


def packed(sequences: list[torch.Tensor], exact: bool) -> tuple[torch.Tensor, PackedAttention]:
    return torch.cat(sequences), PackedAttention([len(ids) for ids in sequences], exact, torch.device("cpu"))


def reference_logits(reference, sequences: list[torch.Tensor]) -> torch.Tensor:
    """transformers on each sequence alone, [T, V]: whatever depends on packing is wrong."""
    return torch.cat([reference(ids[None], use_cache=False).logits[0] for ids in sequences])


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual - expected).abs().max().item()


@EXACT
@FAMILY
def test_packed_prefill_equals_transformers(family, exact):
    """E12: wrong rotation, window, norm, bias or GQA order of one family; a packed sequence that sees its neighbour."""
    reference, sequences = FAMILIES[family], random_ids(LENGTHS)
    model = ours(reference)
    ids, attend = packed(sequences, exact)
    targets, temperature = ids.roll(-1), 0.7
    with torch.no_grad():
        expected = reference_logits(reference, sequences)
        hidden = model.model(ids, attend.positions, attend)
        assert worst(model.lm_head(hidden), expected) <= 1e-5
        logps = log_probs(hidden, model.lm_head.weight, torch.ones(1, 1), model.vocab)
        assert worst(logps, expected.log_softmax(-1)) <= 1e-5
        chosen, entropy = model(ids, attend, torch.arange(len(ids)), targets, Head(temperature, model.vocab, 3))
        tempered = torch.log_softmax(expected / temperature, -1)
        assert worst(chosen, tempered.gather(1, targets[:, None])[:, 0]) <= 1e-5
        assert worst(entropy, -(tempered.exp() * tempered).sum(-1)) <= 1e-5


@EXACT
@FAMILY
def test_paged_decode_equals_transformers(family, exact):
    """E12: a cache written to the wrong slot or layer, positions that restart with a chunk, a window counted from the chunk."""
    reference, lengths, prompts = FAMILIES[family], [9, 5, 26, 7, 2, 18], [4, 5, 19, 1, 1, 13]
    model, sequences = ours(reference), random_ids(lengths, seed=2)
    with torch.no_grad():
        expected = reference_logits(reference, sequences)
    for chunk, batch, block_size in [(1, 3, 4), (3, 6, 4), (7, 2, 16), (100, 6, 5)]:
        logits = run_paged(model, sequences, prompts, [0] * 6, chunk=chunk, batch=batch, block_size=block_size, exact=exact,
                           call=lambda ids, at, attend, rows: model.lm_head(model.model(ids, at, attend)[rows]))
        assert worst(torch.cat(logits), expected) <= 1e-5, (chunk, batch, block_size)


@EXACT
@FAMILY
def test_gradients_equal_transformers(family, exact):
    """A backward that forgets the temperature, the entropy, a bias, or one of the two uses of a tied embedding."""
    reference, sequences, temperature = FAMILIES[family], random_ids(LENGTHS, seed=3), 0.7
    model = ours(reference)
    ids, attend = packed(sequences, exact)
    rows, generator = torch.arange(0, len(ids), 2), torch.Generator().manual_seed(0)
    targets, weights = random_ids([len(rows)])[0], torch.randn(2, len(rows), generator=generator)

    chosen, entropy = model(ids, attend, rows, targets, Head(temperature, model.vocab, 3))
    (weights[0] * chosen + weights[1] * entropy).sum().backward()
    logps = torch.log_softmax(reference_logits(reference, sequences)[rows] / temperature, -1)
    expected = (weights[0] * logps.gather(1, targets[:, None])[:, 0] - weights[1] * (logps.exp() * logps).sum(-1)).sum()
    named = dict(reference.named_parameters())
    for name, grad in zip(named, torch.autograd.grad(expected, list(named.values())), strict=True):
        mine = model.get_parameter(name).grad
        assert worst(mine, grad) <= 1e-5 * grad.abs().max().item(), name


@FAMILY
def test_every_tensor_has_one_place(family):
    """E12: a tensor of the checkpoint that no parameter takes (`ours` checks names and shapes), a tied head that is a copy."""
    reference = FAMILIES[family]
    model = ours(reference)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == reference.config.tie_word_embeddings
    assert model.shape.parameters == sum(parameter.numel() for parameter in reference.parameters())


def test_llama3_rope_tables():
    """E12: one of the three wavelength regimes of llama3 scaling missed; positions rounded to bf16 (257 becomes 256)."""
    config, shape = FAMILIES["llama-rope"].config, ours(FAMILIES["llama-rope"]).shape
    rotary = LlamaRotaryEmbedding(config)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    slowdown = plain / rotary.inv_freq
    kept, stretched = (slowdown - 1).abs() < 1e-5, (slowdown - 8).abs() < 1e-5
    assert kept.sum() == 1 and stretched.sum() == 5, "the ramp must have the other two, else this test misses a regime"
    positions = torch.cat([torch.arange(300), torch.tensor([1023, 8191, 131071])])
    for expected, actual in zip(rotary(torch.zeros(1), positions[None]), rope_tables(shape, positions), strict=True):
        assert actual.dtype == torch.float32
        assert worst(actual[:, 0], expected[0]) <= 1e-5


@EXACT
@pytest.mark.parametrize("lengths", [[5, 9], [9, 5], [9, 9]], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_packed_sequences_are_independent(family, lengths, exact):
    """R3: attention or positions that run over a sequence's end; a bucket of equal lengths that mixes its rows."""
    model, (first, second) = ours(FAMILIES[family]), random_ids(lengths, seed=4)

    def logps(*sequences: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, attend = packed(list(sequences), exact)
        chosen, _ = model(ids, attend, torch.arange(len(ids)), torch.full_like(ids, 7), Head(1.0, model.vocab, 1000))
        return chosen.detach().split([len(sequence) for sequence in sequences])

    together = logps(first, second)
    for alone, row in zip((first, second), together, strict=True):
        assert worst(row, *logps(alone)) <= 1e-5
    changed = logps((first + 1) % 64, second)
    assert torch.equal(changed[1], together[1]) and not torch.equal(changed[0], together[0])
    changed = logps(first, (second + 1) % 64)
    assert torch.equal(changed[0], together[0]) and not torch.equal(changed[1], together[1])


@EXACT
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_micro_batch_without_rows_gives_every_parameter_a_zero_gradient(recompute, exact):
    """L11: a rank with nothing to train on hangs the others if a parameter has no gradient, and spoils them if one is NaN."""
    model, nothing = ours(FAMILIES["qwen3-bias"]), torch.empty(0, dtype=torch.long)
    for layer in model.model.layers:
        layer.recompute = recompute
    ids, attend = packed([torch.tensor([0])], exact)
    chosen, _ = model(ids, attend, nothing, nothing, Head(1.0, model.vocab, 4))
    chosen.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_head_rows_beyond_the_tokenizer_do_not_exist():
    """E5: rows 60-63 of the head, raised by 20, win the argmax, take probability, or stand in the learner's log-partition."""
    reference, (ids,) = FAMILIES["llama"], random_ids([24], vocab=60, seed=5)
    plain, raised, rows = ours(reference, 60), ours(reference, 60), torch.arange(24)
    attend = PackedAttention([24], True, torch.device("cpu"))
    with torch.no_grad():
        logits = reference_logits(reference, [ids])
        hidden = raised.model(ids, attend.positions, attend)
        raised.lm_head.weight[60:] += 20 * torch.linalg.pinv(hidden).sum(1)  # hidden @ this = 20 in every row
        everything = raised.lm_head(hidden)
    assert (everything[:, 60:] - logits[:, 60:] - 20).abs().max() < 1e-2 and (everything.argmax(-1) >= 60).all()

    partition = {}
    for temperature in (1.0, 1.2):
        expected = torch.log_softmax(logits[:, :60] / temperature, -1)
        for name, model in {"plain": plain, "raised": raised}.items():
            with torch.no_grad():
                engine = torch.log_softmax(model.next_logits(ids, attend.positions, attend, rows) / temperature, -1)
            assert (engine[:, 60:] == -torch.inf).all() and not engine[:, 60:].exp().any()
            assert (engine.argmax(-1) < 60).all()
            assert worst(engine[:, :60], expected) <= 1e-5
            learner, entropy = model(ids, attend, rows, ids, Head(temperature, model.vocab, 7))
            assert worst(entropy.detach(), -(expected.exp() * expected).sum(-1)) <= 1e-5
            partition[name] = logits.gather(1, ids[:, None])[:, 0] / temperature - learner.detach()
            assert worst(partition[name], torch.logsumexp(logits[:, :60] / temperature, -1)) <= 1e-5
        assert torch.equal(partition["plain"], partition["raised"])
    (learner.sum() + entropy.sum()).backward()
    assert not raised.lm_head.weight.grad[60:].any()
    assert all(parameter.grad.isfinite().all() for parameter in raised.parameters())


class Alive(TorchDispatchMode):
    """Bytes of every tensor that was made under it and still exists, whoever holds it."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return result

    @property
    def size(self) -> int:
        storages = [storage for reference in self.storages.values() if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in storages)


@EXACT
def test_recomputed_activations_give_the_same_bits(exact):
    """Activation recompute that changes loss or gradient, or that is switched on and does nothing."""
    ids, attend = packed(random_ids(LENGTHS, seed=6), exact)
    found, kept = {}, {}
    for recompute in ("none", "selective", "full"):
        model, calls = ours(FAMILIES["qwen2-window"]), []
        for layer in model.model.layers:
            layer.recompute = recompute
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        with Alive() as alive:
            chosen, entropy = model(ids, attend, torch.arange(len(ids)), ids.roll(-1), Head(0.7, model.vocab, 16))
            loss = chosen.sum() + entropy.sum()
            kept[recompute] = alive.size
        loss.backward()
        found[recompute] = (len(calls), loss.detach(), [parameter.grad for parameter in model.parameters()])
    _, plain_loss, plain_grads = found["none"]
    assert [calls for calls, *_ in found.values()] == [3, 6, 6], "one forward a layer, and a second one where it is recomputed"
    for _, loss, grads in found.values():
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(grad, plain) for grad, plain in zip(grads, plain_grads, strict=True))
    # 56 rows x (q, o, down 64, k, v 32, gate, up 80 columns) in 3 layers.
    products = 4 * 56 * 3 * (3 * 64 + 2 * 32 + 2 * 80)
    assert kept["selective"] - kept["full"] == products
    assert kept["none"] - kept["selective"] > products / 2, kept


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(("name", "seed"), [
    (UP.replace("0", "1"), 3), (UP.replace("up", "gate"), 3), (UP, 0), (UP, 4), (UP, 2**33)])
def test_initial_values_differ_by_name_and_seed(name, seed):
    """Layers that start as copies of each other; a seed without effect (torch's CPU generator reads 32 bits of it) or too large."""
    shape, size = ours(FAMILIES["qwen3-bias"]).shape, torch.Size([300, 200])
    both = torch.stack([init_tensor(UP, size, shape, 3).flatten(), init_tensor(name, size, shape, seed).flatten()])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.02


def test_initial_values_depend_on_nothing_else():
    """Ranks that draw other weights for one tensor because something was drawn before; a wrong std; norms or biases drawn too."""
    model = ours(FAMILIES["qwen3-bias"])
    shape = dataclasses.replace(model.shape, init_std=0.05)
    for name, parameter in model.named_parameters():
        torch.manual_seed(1)
        value = init_tensor(name, parameter.shape, shape, 3)
        torch.manual_seed(2)
        assert torch.equal(value, init_tensor(name, parameter.shape, shape, 3)) and value.dtype == torch.float32
        if parameter.ndim == 1:
            assert torch.equal(value, torch.full_like(value, 0.0 if name.endswith("bias") else 1.0)), name
        else:
            assert abs(value.mean()) < 5e-3 and abs(value.std() - 0.05) < 3e-3, name
