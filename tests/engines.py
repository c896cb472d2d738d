"""Engines with the weights of tiny.py's models, and the textbook to compare them with.

The reference is transformers on the whole sequence for every single token (no cache, no batch), with argmax or an inverse CDF
written out in Python. The engine's tokens must be its tokens, and the logprobs its logprobs to 1e-5.
"""

import math
from collections.abc import Iterable

import pytest
import torch
from tiny import FAMILIES, hf_config

import settings
from actor import Engine
from ledger import Ledger
from scheduler import Request
from shape import shape_from_hf
from transfer import matrix


def build(reference="llama", *, vocab=64, version=0, longest=(40, 24), exact=False, seed=0, dtype="float32", **actor) -> Engine:
    """An engine with the weights of one of tiny.py's models; `longest` is the longest prompt and the longest response."""
    reference = FAMILIES[reference] if isinstance(reference, str) else reference
    config = settings.build({
        "exact": exact, "seed": seed, "model": {"dtype": dtype}, "data": {"max_prompt_tokens": longest[0]},
        "rollout": {"max_new_tokens": longest[1]},
        "actor": {"block_size": 4, "kv_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64} | actor})
    engine = Engine(config, shape_from_hf(hf_config(reference)), vocab, torch.device("cpu"), Ledger(trace=False))
    load(engine, reference)
    if version >= 0:
        engine.publish(version)
    return engine


def load(engine: Engine, reference) -> None:
    """Every parameter to where the engine's layout says that it lands."""
    write(engine, {name: parameter.detach() for name, parameter in reference.named_parameters()})


def write(engine: Engine, parameters: dict[str, torch.Tensor]) -> None:
    live, layout = engine.weights(), engine.runner.layout
    assert parameters.keys() == layout.keys()
    for name, landings in layout.items():
        for at in landings:
            part = matrix(parameters[name])[at.row0:at.row1, at.col0:at.col1]
            matrix(live[at.tensor])[at.to_row:at.to_row + part.shape[0], at.to_col:at.to_col + part.shape[1]] = part


def prompt_of(length: int, seed: int, vocab: int = 64) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def add(engine: Engine, requests: list[Request]) -> None:
    """Queue the requests, all of a group at once."""
    for group in dict.fromkeys(request.group for request in requests):
        engine.scheduler.add([request for request in requests if request.group == group])


def finish(engine: Engine, requests: list[Request], before: Iterable[Request] = ()) -> None:
    """Steps until nothing is left; then exactly these requests have come out (some `before`), and all blocks are back."""
    finished = list(before)
    for _ in range(2000):
        finished += engine.step()
        if not engine.scheduler.unfinished:
            break
    assert len(finished) == len(requests) and set(finished) == set(requests)
    everything_is_free(engine)


def run(engine: Engine, requests: list[Request]) -> None:
    add(engine, requests)
    finish(engine, requests)


def everything_is_free(engine: Engine) -> None:
    pool = engine.scheduler.pool
    assert engine.scheduler.unfinished == 0 and not any(pool.refs)
    assert sorted(pool.free) == list(range(pool.num_blocks))


def key(request: Request) -> tuple[int, int]:
    return request.group, request.sample


def response(request: Request) -> list[int]:
    return request.tokens[request.num_prompt:]


def invert(logp_V: torch.Tensor, u: float) -> int:
    """The first token at which the running sum of the probabilities exceeds u times their sum."""
    probabilities = logp_V.exp().double().tolist()
    total, target = 0.0, u * math.fsum(probabilities)
    for token, probability in enumerate(probabilities):
        total += probability
        if total > target:
            return token
    raise AssertionError(f"no token for {u}")


@torch.no_grad()
def next_logp(reference, tokens: list[int], temperature: float, vocab: int = 64) -> torch.Tensor:
    logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1, :vocab]
    return torch.log_softmax(logits / (temperature or 1.0), -1)


def naive(reference, tokens: list[int], new: int, temperature: float = 0.0, numbers=(), stop=(), vocab: int = 64):
    """(response ids, logprobs) by a full forward per token; `numbers` has one uniform for each."""
    tokens, prompt, logps = list(tokens), len(tokens), []
    while len(tokens) < prompt + new and not (logps and tokens[-1] in stop):
        logp = next_logp(reference, tokens, temperature, vocab)
        token = invert(logp, numbers[len(logps)]) if temperature else int(logp.argmax())
        tokens.append(token)
        logps.append(logp[token].item())
    return tokens[prompt:], logps


def scored(reference, request: Request, vocab: int = 64) -> torch.Tensor:
    """The reference's logprob of every response token, given all tokens before it."""
    return torch.stack([next_logp(reference, request.tokens[:at], request.temperature, vocab)[request.tokens[at]]
                        for at in range(request.num_prompt, len(request.tokens))])


def same(request: Request, expected: tuple[list[int], list[float]]) -> None:
    assert response(request) == expected[0]
    assert request.logprobs == pytest.approx(expected[1], abs=1e-5, rel=0)
