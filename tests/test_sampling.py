"""Sampling: cases E1, E5, E8, the random numbers, and everything that one sample's tokens and logprobs must not depend on."""

import copy
import functools
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from engines import add, build, finish, invert, key, naive, next_logp, prompt_of, response, run
from tiny import FAMILIES

import settings as from_yaml
from actor import Engine
from config import ConfigError
from kernels.logprob import entropy, log_probs
from kernels.sampling import Knobs
from kernels.sampling import sample as sample_rows
from runner import uniforms
from scheduler import Request

EXACT = pytest.mark.parametrize("exact", [False, True], ids=["sdpa", "exact"])


def sample(logits: torch.Tensor, greedy: list[bool], numbers: np.ndarray, temperature: float = 1.0) -> list[tuple[int, float]]:
    knobs = Knobs.of([(0.0 if flag else temperature, 0, 1.0, 0.0) for flag in greedy], "cpu")
    tokens, logprobs = sample_rows(logits, knobs, torch.from_numpy(numbers))
    return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def two_token_engine() -> Engine:
    """Logits [2, 0] (and 62 masked ids) whatever the context: the embedding is ones, the layers add nothing."""
    engine = build(vocab=2, max_num_seqs=64, version=-1)
    for name, weight in engine.weights().items():
        weight.fill_(0.0 if "proj" in name else 1.0)
    engine.weights()["lm_head.weight"].copy_(torch.tensor([[2.0], [0.0]] + [[9.0]] * 62) / 64)
    engine.publish(0)
    return engine


def test_logprob_of_a_tempered_token():
    """E1: a logprob without the temperature (-.126928), or one that only greedy, only sampled tokens get."""
    logp = log_probs(torch.ones(1, 1), torch.tensor([[2.0], [0.0]]), torch.full((1, 1), 0.5), 2)
    right = {0: pytest.approx(-0.018150, abs=1e-6), 1: pytest.approx(-4.018150, abs=1e-6)}
    logits = torch.tensor([[2.0, 0.0]])
    assert sample(logits, [True], np.zeros(1)) == [(0, pytest.approx(-0.126928, abs=1e-6))], "greedy counts as temperature 1"
    assert sample(logits, [False], np.zeros(1), 0.5) == [(0, right[0])]
    assert sample(logits, [False], np.array([0.99]), 0.5) == [(1, right[1])]
    assert entropy(logp).item() == pytest.approx(0.090095, abs=1e-6)

    engine = two_token_engine()
    requests = [Request(group, 0, [1, 0, 1], 10, 0.5) for group in range(50)]
    run(engine, requests)
    drawn = [pair for request in requests for pair in zip(response(request), request.logprobs, strict=True)]
    assert all(logprob == right[token] for token, logprob in drawn)
    assert {token for token, _ in drawn} == {0, 1}
    evaluation = Request(99, 0, [1, 0, 1], 2, 0.0)
    run(engine, [evaluation])
    assert response(evaluation) == [0, 0] and evaluation.logprobs == [pytest.approx(-0.126928, abs=1e-6)] * 2


def test_ids_beyond_the_tokenizer_are_never_sampled():
    """E5: 10^4 draws at T 1.2 and greedy ones, while the head's rows 60-63 lie at least 20 above the others."""
    reference = copy.deepcopy(FAMILIES["llama"])
    with torch.no_grad():  # hidden dimension 0 stays constant and positive, and only the padding rows read it
        for name, parameter in reference.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[0] = 0
        reference.model.embed_tokens.weight[:, 0] = 1.0
        reference.lm_head.weight[:, 0] = 0
        reference.lm_head.weight[60:, 0] = 200
    engine = build(reference, vocab=60, max_num_seqs=256, max_num_batched_tokens=1024, longest=(8, 40), kv_blocks=3200)
    requests = [Request(group, 0, prompt_of(4, group, 60), 40, 1.2) for group in range(250)]
    requests += [Request(250 + group, 0, prompt_of(4, group, 60), 40, 0.0) for group in range(6)]
    run(engine, requests)
    drawn = Counter(token for request in requests for token in response(request))
    assert drawn.total() == 10_240 and max(drawn) < 60
    with torch.no_grad():
        logits = reference(torch.tensor([request.tokens for request in requests]), use_cache=False).logits[:, 3:]
    assert (logits[..., 60:].amin(-1) - logits[..., :60].amax(-1)).min() > 20, "the rows must win, else this tests nothing"


def test_draws_follow_the_tempered_distribution():
    """A CDF that is off by one id, a temperature applied to p instead of z, uniforms that differ too little by group or sample."""
    prompt, temperature = prompt_of(6, 1), 1.2
    engine = build("qwen2", vocab=60, max_num_seqs=256, max_num_batched_tokens=2048, longest=(8, 2), kv_blocks=2000)
    requests = [Request(group, number, list(prompt), 1, temperature) for group in range(256) for number in range(16)]
    run(engine, requests)
    expected = 4096 * next_logp(FAMILIES["qwen2"], prompt, temperature, 60).double().exp()
    counts = torch.bincount(torch.tensor([response(request)[0] for request in requests]), minlength=60)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert expected.min() > 3 and chi_square < 59 + 4 * math.sqrt(2 * 59)


ALMOST_ONE = 1 - 2.0**-48


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_inverse_cdf_against_a_plain_loop(temperature):
    """A search that takes the token before or after, an unsorted or unnormalised CDF, greedy rows that take the sampled token."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 23, generator=generator)
    logits[torch.rand(400, 23, generator=generator) < 0.3] = -torch.inf
    logits[:, 11] = 0.0
    logp = torch.log_softmax(logits / temperature, -1)
    numbers = torch.rand(400, generator=generator, dtype=torch.float64).numpy()
    for flags in ([False] * 400, [row % 3 == 0 for row in range(400)], [True] * 400):
        right = [int(row.argmax()) if flag else invert(row, u) for row, flag, u in zip(logp, flags, numbers, strict=True)]
        found = sample(logits, flags, numbers, temperature)
        assert [token for token, _ in found] == right
        tempered = torch.where(torch.tensor(flags)[:, None], torch.log_softmax(logits, -1), logp)
        assert [logprob for _, logprob in found] == tempered[torch.arange(400), right].tolist()


def test_a_large_vocabulary_keeps_its_tail():
    """A CDF summed in fp32: half the vocabulary of SmolLM2 with 1e-9 each, behind one likely token, would never be drawn."""
    logits = torch.zeros(1, 49152)
    logits[0, 1000] = 20.0
    logp = torch.log_softmax(logits, -1)
    numbers = np.array([5e-7, *(1 - np.geomspace(5e-7, 9e-5, 8))])
    right = [invert(logp[0], u) for u in numbers]
    assert len(set(right)) == 9 and 1000 not in right, "each of these must be another token of the tail"
    found = sample(logits.expand(9, -1), [False] * 9, numbers)
    assert [token for token, _ in found] == right


@pytest.mark.parametrize("u", [0.0, 2.0**-48, 0.5, ALMOST_ONE])
def test_a_sampled_token_always_has_a_probability(u):
    """E8: -inf or 0 x inf in a logprob: u = 0 takes a masked first id, u next to 1 runs past the last id with a probability."""
    last = 48
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    rows[:, 0] = rows[:, last + 1:] = -torch.inf
    rows[1, :20], rows[2, 30:] = -torch.inf, -torch.inf
    rows[3] = torch.where(torch.arange(50) == 7, 0.0, -torch.inf)
    rows[4, :40] = -300.0  # exp underflows: not masked, but without a probability
    rows[5, 25:] = -300.0
    logp = torch.log_softmax(rows, -1)
    found = sample(rows, [False] * 6, np.full(6, u))
    for row, (token, logprob) in zip(logp, found, strict=True):
        possible = row.exp().nonzero()[:, 0].tolist()
        assert row[token].exp() > 0 and logprob == row[token].item()
        if u in (0.0, ALMOST_ONE):
            assert token == (possible[0] if u == 0 else possible[-1])
    json.dumps(found, allow_nan=False)


def test_low_temperature_gives_finite_logprobs():
    """E8: T 0.01, where most ids underflow: a stored logprob that is -inf, NaN or positive breaks the loss and the JSON lines."""
    engine = build("llama-theta", seed=3)
    requests = [Request(group, 0, prompt_of(5, group), 20, temperature) for group in range(8) for temperature in (0.01, 1e-6)]
    run(engine, requests)
    logprobs = [logprob for request in requests for logprob in request.logprobs]
    assert len(logprobs) == 320 and all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
    assert min(logprobs) < 0, "some draw at T 0.01 must be less than certain, else this tests nothing"
    assert json.loads(json.dumps(logprobs, allow_nan=False)) == logprobs


@pytest.mark.parametrize("extreme", [{"rollout": {"temperature": 1e-38}}, {"seed": 2**64}], ids=str)
def test_extremes_work_or_are_refused(extreme):
    """R6: a temperature that turns logits into inf, a seed that 64 bits do not hold: an IndexError hours later, without a name."""
    try:
        settings = from_yaml.build(extreme)
    except ConfigError as error:
        assert next(iter(extreme)) in str(error)
        return
    request = Request(0, 0, [1, 2, 3], 4, settings.rollout.temperature)
    run(build(seed=settings.seed), [request])
    assert all(math.isfinite(logprob) for logprob in request.logprobs)


# --- randomness


GRID = list(itertools.product(range(-20, 60), range(16), range(64)))


def chi_square(cells: np.ndarray, buckets: int) -> float:
    expected = len(cells) / buckets
    return float(((np.bincount(cells, minlength=buckets) - expected) ** 2).sum() / expected)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_uniforms_are_uniform(seed):
    """Numbers outside [0, 1), with few bits, or that run in step along neighbouring groups, samples or positions."""
    values = uniforms(seed, GRID)
    assert values.dtype == np.float64 and values.shape == (81_920,)
    assert 0 <= values.min() < 1e-3 and 1 - 1e-3 < values.max() < 1
    assert (values * 2.0**48 % 1 == 0).all(), "u x total < total holds for 48 bits"
    assert len(np.unique(values)) == len(values), "two tokens share their random number"
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 81_920)
    assert abs(values.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / 81_920)
    limit = 255 + 4 * math.sqrt(2 * 255)
    assert chi_square((values * 256).astype(int), 256) < limit
    cells = (values * 16).astype(int).reshape(80, 16, 64)
    for axis in range(3):
        neighbours = np.take(cells, range(1, cells.shape[axis]), axis) * 16 + np.take(cells, range(cells.shape[axis] - 1), axis)
        assert chi_square(neighbours.ravel(), 256) < limit, f"neighbours along axis {axis} are not independent"


def test_uniforms_depend_on_their_key_alone():
    """A number that depends on its row in the batch."""
    values = uniforms(5, GRID[::777])
    assert [uniforms(5, [key])[0] for key in GRID[::777]] == values.tolist()
    assert uniforms(5, []).shape == (0,)


@pytest.mark.parametrize("other", [1, 2, 63, 2**32, 2**48 + 1])
def test_seeds_share_no_random_numbers(other):
    """Two runs with different seeds that draw the same numbers, in the same or in another order of groups."""
    shared = set(uniforms(0, GRID)) & set(uniforms(other, GRID))
    assert not shared, f"{len(shared)} of {len(GRID)} numbers"


STOP = frozenset({5, 21, 40})
WORK = {0: (9, 4), 3: (17, 2), -2: (17, 2), 7: (1, 1), 4: (30, 1)}  # group -> prompt tokens, samples; 3 and -2 share a prompt
NEW, TEMPERATURE, SEED = 10, 1.1, 11


def workload(shift: int = 0) -> list[Request]:
    return [Request(group + shift, number, prompt_of(length, length), NEW, TEMPERATURE, STOP)
            for group, (length, samples) in WORK.items() for number in range(samples)]


@functools.cache
def drawn_naively(family: str) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    return {key(request): naive(
        FAMILIES[family], request.tokens, NEW, TEMPERATURE,
        uniforms(SEED, [(*key(request), position) for position in range(NEW)]), STOP) for request in workload()}


@functools.cache
def plain(family: str, exact: bool) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    return outcome(together(family, exact=exact))


def outcome(requests: list[Request]) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    return {key(request): (response(request), request.logprobs) for request in requests}


def together(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), workload()
    run(engine, requests)
    return requests


def preempted(family: str, **settings) -> list[Request]:
    requests = together(family, kv_blocks=16, block_size=4, **settings)
    assert sum(request.preemptions for request in requests) >= 2
    return requests


def unshared(family: str, **settings) -> list[Request]:
    requests = together(family, block_size=64, kv_blocks=20, **settings)
    assert not any(request.prefix_hits for request in requests)
    return requests


def alone(family: str, **settings) -> list[Request]:
    requests = workload()
    for request in requests:
        run(build(family, seed=SEED, **settings), [request])
    return requests


def warm(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), workload()
    run(engine, workload(shift=100))
    run(engine, requests)
    assert all(request.prefix_hits == (request.num_prompt - 1) // 4 * 4 for request in requests)
    return requests


def backwards(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), workload()[::-1]
    run(engine, requests)
    return requests


def one_by_one(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), sorted(workload(), key=lambda request: request.sample * 7 % 4)
    for request in requests:
        engine.scheduler.add([request])
    finish(engine, requests)
    return requests


def joining(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), workload()
    add(engine, requests[:4])
    before = [request for _ in range(4) for request in engine.step()]
    add(engine, requests[4:])
    finish(engine, requests, before)
    return requests


def republished(family: str, **settings) -> list[Request]:
    engine, requests = build(family, seed=SEED, **settings), workload()
    add(engine, requests)
    finished = []
    while engine.scheduler.unfinished:
        finished += engine.step() + engine.step() + engine.step()
        engine.publish(engine.scheduler.version + 1)
    assert len(finished) == len(requests) and max(request.versions[-1] for request in requests) >= 3
    return requests


WAYS = {
    "one at a time": functools.partial(together, max_num_seqs=1),
    "three at a time": functools.partial(together, max_num_seqs=3),
    "chunks of 5": functools.partial(together, max_num_batched_tokens=5, max_num_seqs=5),
    "single tokens": functools.partial(together, max_num_batched_tokens=1, max_num_seqs=1),
    "whole prompts": functools.partial(together, max_num_batched_tokens=2048),
    "blocks of 1": functools.partial(together, block_size=1),
    "blocks of 5": functools.partial(together, block_size=5),
    "blocks of 16": functools.partial(together, block_size=16),
    "no shared blocks": unshared, "preempted": preempted, "alone": alone, "warm cache": warm, "backwards": backwards,
    "one by one": one_by_one, "joining a running batch": joining, "republished": republished,
}
RANDOM_FAMILIES = ["llama", "qwen2-window"]


@EXACT
@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_sampled_output_is_that_of_a_full_recompute(family, exact):
    """The random number of another sample or position, of u scaled by a wrong sum; samples of one prompt that are copies."""
    found, expected = plain(family, exact), drawn_naively(family)
    assert found.keys() == expected.keys()
    for sample_key, (tokens, logprobs) in found.items():
        assert tokens == expected[sample_key][0]
        assert logprobs == pytest.approx(expected[sample_key][1], abs=1e-5, rel=0)
    assert len({tuple(tokens) for tokens, _ in found.values()}) == len(found)
    assert {tokens[-1] in STOP for tokens, _ in found.values()} == {True, False}


@EXACT
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_a_sample_depends_on_nothing_but_its_key(family, way, exact):
    """DESIGN 4: batch mates, slots, chunks, blocks, hits, preemption, order, or a publication change a token; exact: or a bit."""
    found, expected = outcome(WAYS[way](family, exact=exact)), plain(family, exact)
    assert found.keys() == expected.keys()
    for sample_key, (tokens, logprobs) in found.items():
        assert tokens == expected[sample_key][0]
        if exact:
            assert logprobs == expected[sample_key][1]
        else:
            assert logprobs == pytest.approx(expected[sample_key][1], abs=1e-5, rel=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named(temperature):
    """NaN weights end in an index error, or in tokens sampled from garbage, that do not name the cause."""
    engine = build(version=-1)
    engine.weights()["model.norm.weight"][3] = torch.nan
    engine.publish(0)
    add(engine, [Request(0, 0, [1, 2, 3], 4, temperature)])
    with pytest.raises(FloatingPointError, match="published weights"):
        engine.step()
