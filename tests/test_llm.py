"""`actor.LLM` on tiny folders, and its command line: what comes out is what transformers computes from the same folder.

References: transformers' own greedy `generate`, a full forward per token with an inverse CDF in Python (engines.py), and its
distribution in float64. The tokenizer has 61 pieces of one to three letters, so any random response is text in which stop
strings come up, most of them across tokens.
"""

import contextlib
import copy
import functools
import json
import math
import os
import re
import subprocess
import sys
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from engines import everything_is_free, naive, next_logp, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from actor import LLM, Completion, SamplingParams, main
from config import ConfigError
from runner import uniforms

ROOT = Path(__file__).parents[1]
PIECES = ["<s>", "<pad>", "</s>", *("".join(letters) for size in (1, 2, 3) for letters in product("abcd", repeat=size))][:64]
PIECES[63] = " "
EOS = 2  # also in tiny.py's config.json
SMALL = {"block_size": 4, "kv_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64}


def write(folder: Path, model, pieces=PIECES, **more) -> str:
    """A folder as `save_pretrained` writes it; `more` goes into tokenizer_config.json."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(PIECES[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @functools.cache
    def make(family: str) -> str:
        return write(tmp_path_factory.mktemp(family), FAMILIES[family])
    return make


@pytest.fixture(scope="module")
def shared(folders):
    return LLM(folders("llama"), seed=3, **SMALL)


@pytest.fixture
def llm(shared):
    """One LLM for tests that do not depend on what it has done before; after each of them every block is free."""
    yield shared
    everything_is_free(shared.engine)


def text_of(ids: list[int]) -> str:
    return "".join(PIECES[token] for token in ids if token > 2)


@functools.cache
def drawn(model, key: tuple[int, int, int], prompt: tuple[int, ...], new: int, temperature=1.0, stop=(EOS,)) -> tuple[list, list]:
    """(ids, logprobs) that the random numbers of (seed, group, sample) give; with a seed of its own a prompt's group is 0."""
    seed, group, sample = key
    return naive(model, prompt, new, temperature, uniforms(seed, [(group, sample, at) for at in range(new)]), stop)


def ids_of(outputs) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.samples] for output in outputs]


# --- what comes out


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "mistral-window"])
def test_greedy_is_transformers_greedy(family, exact, folders):
    """A tensor of the folder that lands elsewhere, a config field lost on the way, an EOS that only one of both stops at."""
    one, prompts = LLM(folders(family), exact=exact, **SMALL), [prompt_of(length, length, 60) for length in (1, 7, 30)]
    outputs = one.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    theirs = AutoModelForCausalLM.from_pretrained(folders(family), attn_implementation="eager", dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        (sample,) = output.samples
        ids = torch.tensor([prompt])
        right = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=1)
        assert prompt + sample.token_ids == right[0].tolist() and output.prompt_token_ids == prompt
        assert sample.text == text_of(sample.token_ids) and sample.finish_reason in ("length", "stop")
        right = naive(FAMILIES[family], prompt, 12, stop={EOS})[1]
        assert sample.logprobs == pytest.approx(right, abs=1e-5, rel=0)
    everything_is_free(one.engine)


def test_texts_and_ids_mixed_each_with_its_own_parameters(folders):
    """Outputs in the order of finishing, samples of one prompt under another's parameters, a limit that shifts by one sample."""
    one = LLM(folders("qwen3"), seed=5, **SMALL)
    one.generate(["a", "b"], SamplingParams(max_tokens=1))  # two prompts before
    prompts = ["abcd", [9, 8, 7, 30, 31], "d a", [40]]
    params = [SamplingParams(n=3, temperature=0.7, max_tokens=(9, 1, 4)), SamplingParams(temperature=0, max_tokens=6),
              SamplingParams(n=2, temperature=1.3, max_tokens=5), SamplingParams(n=1, max_tokens=20)]
    outputs = one.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [[3, 4, 5, 6], [9, 8, 7, 30, 31], [6, 63, 3], [40]]
    for number, (output, each) in enumerate(zip(outputs, params, strict=True)):
        assert [(sample.prompt, sample.sample) for sample in output.samples] == [(number, at) for at in range(each.n)]
        for sample in output.samples:
            limit = each.max_tokens[sample.sample] if isinstance(each.max_tokens, tuple) else each.max_tokens
            key, prompt = (5, 2 + number, sample.sample), tuple(output.prompt_token_ids)
            ids, logprobs = drawn(FAMILIES["qwen3"], key, prompt, limit, each.temperature)
            assert sample.token_ids == ids and sample.logprobs == pytest.approx(logprobs, abs=1e-5, rel=0)
            assert sample.text == text_of(ids) and sample.finish_reason == ("stop" if ids[-1] == EOS else "length")
    assert one.generate([]) == [] and len(one.generate(["a"])[0].samples[0].token_ids) <= 16
    everything_is_free(one.engine)


def test_a_response_ends_where_the_model_does(folders):
    """A response beyond max_model_len, whose positions the model never saw and whose blocks do not exist."""
    one = LLM(folders("llama"), **SMALL | {"kv_blocks": 16})
    for length in (1, 40, 63):
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        (sample,) = one.generate([prompt_of(length, 1, 60)], params)[0].samples
        assert len(sample.token_ids) == 64 - length and sample.finish_reason == "length"
    assert LLM(folders("llama"), kv_blocks=40).longest == 512, "of the model, where nothing is said"
    everything_is_free(one.engine)


def test_bfloat16(folders):
    """A dtype that is said and not used, or logprobs that bf16 has made useless."""
    one, prompt = LLM(folders("llama"), dtype="bfloat16", seed=1, **SMALL), prompt_of(9, 4, 60)
    assert {weight.dtype for weight in one.engine.weights().values()} == {one.engine.runner.cache.dtype} == {torch.bfloat16}
    rounded = copy.deepcopy(FAMILIES["llama"]).bfloat16().float()
    (sample,) = one.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))[0].samples
    right = [next_logp(rounded, prompt + sample.token_ids[:at], 1.0)[token].item() for at, token in enumerate(sample.token_ids)]
    assert 1e-5 < max(abs(a - b) for a, b in zip(sample.logprobs, right, strict=True)) < 0.1


# --- randomness


WAYS = {"alone": {"max_num_seqs": 1, "max_num_batched_tokens": 1}, "wide": {}, "preempted": {"kv_blocks": 12, "max_model_len": 48},
        "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5}, "exact": {"exact": True}, "blocks": {"block_size": 16}}
SEEDED = [(prompt_of(7, 1, 60), 11), (prompt_of(7, 1, 60), 12), (prompt_of(25, 2, 60), 11), (prompt_of(1, 3, 60), 0),
          (prompt_of(7, 1, 60), 2**63 - 1)]


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_fixes_the_tokens_whatever_runs_beside(way, folders):
    """Tokens that depend on the batch, its order, its size, the chunks, preemption, the LLM's seed, or on earlier calls."""
    one = LLM(folders("llama"), **SMALL | {"seed": len(way)} | WAYS[way])
    order = list(range(5)) if way != "wide" else [4, 2, 0, 3, 1]
    params = [SamplingParams(n=3, temperature=1.1, max_tokens=10, seed=SEEDED[number][1]) for number in order]
    outputs = one.generate([SEEDED[number][0] for number in order], params)
    right = {number: [drawn(FAMILIES["llama"], (seed, 0, sample), tuple(prompt), 10, 1.1)[0] for sample in range(3)]
             for number, (prompt, seed) in enumerate(SEEDED)}
    assert ids_of(outputs) == [right[number] for number in order]
    assert ids_of(one.generate([SEEDED[0][0]] * 2, [params[order.index(0)], params[order.index(1)]])) == [right[0], right[1]]
    assert len({tuple(ids) for each in right.values() for ids in each}) == 15, "samples, seeds and prompts must differ"
    everything_is_free(one.engine)


def test_without_a_seed_calls_differ_and_a_new_llm_repeats_them(folders):
    """The same samples in every call, or samples that no run can repeat."""
    def calls(seed: int) -> list[list[list[int]]]:
        one, params = LLM(folders("llama"), seed=seed, **SMALL), SamplingParams(n=2, max_tokens=12, ignore_eos=True)
        return [ids_of(one.generate(prompts, params)) for prompts in (["abc", "abc"], ["abc"], ["abc"])]

    first, again, other = calls(7), calls(7), calls(8)
    flat = [tuple(ids) for outputs in first + other for samples in outputs for ids in samples]
    assert first == again and len(set(flat)) == len(flat) == 16


# --- what top-p, top-k and min-p leave over


def kept(p: list[float], params: SamplingParams) -> set[int]:
    """Textbook: the k largest, of these the smallest set with mass >= top_p, and what is at least min_p as likely as the first."""
    order = sorted(range(len(p)), key=lambda token: -p[token])[:params.top_k or None]
    needed = params.top_p * math.fsum(p[token] for token in order)
    before = dict(zip(order, accumulate((p[token] for token in order), initial=0.0), strict=False))
    nucleus = [token for token in order if token == order[0] or params.top_p == 1 or before[token] < needed]
    return {token for token in nucleus if p[token] >= params.min_p * p[order[0]]}


CUTS = [{"top_p": 0.5}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 5, "temperature": 1.5}, {"min_p": 0.2}, {"top_k": 1},
        {"top_k": 20, "top_p": 0.6, "min_p": 0.05, "temperature": 1.2}, {"top_k": 1000}, {"min_p": 1.0}, {"top_p": 0.0}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncation_keeps_the_right_tokens_and_their_full_logprobs(cut, llm):
    """A set too wide or too narrow by one, a cut before the temperature, logprobs of the cut distribution (a learner has none)."""
    params = SamplingParams(n=300, max_tokens=1, seed=1, **cut)
    prompt = prompt_of(6, 8, 60)
    with torch.no_grad():
        logits = copy.deepcopy(FAMILIES["llama"]).double()(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    logp = torch.log_softmax(logits / params.temperature, -1)
    allowed = kept(logp.exp().tolist(), params)
    samples = llm.generate([prompt], params)[0].samples
    tokens = [sample.token_ids[0] for sample in samples]
    assert len(tokens) == 300 and set(tokens) <= allowed
    assert [sample.logprobs[0] for sample in samples] == pytest.approx(logp[tokens].tolist(), abs=1e-5, rel=0)
    expected = {token: 300 * (logp[token].exp() / logp[list(allowed)].exp().sum()).item() for token in allowed}
    assert set(tokens) >= {token for token in allowed if expected[token] > 12}
    chi_square = sum((tokens.count(token) - number) ** 2 / number for token, number in expected.items())
    assert chi_square < len(allowed) - 1 + 4.5 * math.sqrt(2 * len(allowed)), "renormalised, what is left keeps its proportions"


def test_e7_top_p(tmp_path):
    """E7: .8 keeps three, 0 and 1e-8 the most probable one, 1 all four; the logprobs are those of all four."""
    model = copy.deepcopy(FAMILIES["llama"])  # .4, .3, .2, .1 for ids 3...6 in any context: embeddings of ones, idle layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if "proj" in name else 1.0)
        model.lm_head.weight.fill_(-100.0)
        model.lm_head.weight[3:7] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[:, None] / 64
    one = LLM(write(tmp_path, model), **SMALL)
    for top_p, number in [(0.8, 3), (0.0, 1), (1e-8, 1), (1.0, 4)]:
        samples = one.generate(["ab"], SamplingParams(n=16, max_tokens=16, top_p=top_p, seed=4))[0].samples
        pairs = [pair for sample in samples for pair in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert {token for token, _ in pairs} == set(range(3, 3 + number)) and len(pairs) == 256
        assert all(logprob == pytest.approx(math.log(0.4 - 0.1 * (token - 3)), abs=1e-6) for token, logprob in pairs)


# --- ends


@pytest.mark.parametrize("ignore", [False, True])
def test_eos_ends_a_response_and_is_a_token_but_no_text(ignore, tmp_path):
    """The EOS missing in the ids (it is never trained), shown in the text, not stopped at, or stopped at though it is ignored."""
    model = copy.deepcopy(FAMILIES["llama"])
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2.5
    one = LLM(write(tmp_path, model), **SMALL)
    samples = one.generate(["abc"], SamplingParams(n=20, max_tokens=12, seed=0, ignore_eos=ignore))[0].samples
    for sample in samples:
        right, _ = drawn(model, (0, 0, sample.sample), (3, 4, 5), 12, stop=() if ignore else (EOS,))
        assert sample.token_ids == right and len(sample.logprobs) == len(right) and sample.text == text_of(right)
        assert sample.finish_reason == ("stop" if right[-1] == EOS and not ignore else "length")
    assert 3 < sum(EOS in sample.token_ids for sample in samples) < 20 and any(sample.text for sample in samples)
    everything_is_free(one.engine)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(stops=st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_a_stop_string_ends_the_response_in_the_token_that_completes_it(stops, seed, shared):
    """A stop string in the text, tokens drawn after it, its own tokens missing in the ids, or a stop missed across tokens."""
    for sample in shared.generate(["ab"], SamplingParams(n=3, max_tokens=10, seed=seed, stop=tuple(stops)))[0].samples:
        whole, logprobs = drawn(FAMILIES["llama"], (seed, 0, sample.sample), (3, 4), 10)
        ends = [size for size in range(1, len(whole) + 1) if any(stop in text_of(whole[:size]) for stop in stops)]
        ids = whole[:min(ends, default=None)]
        text = text_of(ids)
        assert sample.token_ids == ids and sample.logprobs == pytest.approx(logprobs[:len(ids)], abs=1e-5, rel=0)
        assert sample.text == text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
        assert sample.finish_reason == ("stop" if ends or ids[-1] == EOS else "length")


def test_a_stopped_sample_gives_its_blocks_back_at_once(llm):
    """A sample that its stop string ended and that goes on holding blocks, or a place in the batch, until its neighbours end."""
    params = [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
              SamplingParams(n=4, max_tokens=40, seed=1, stop=tuple("abcd"), ignore_eos=True)]
    stream = llm.stream(["ab", "ba"], params)
    early = [next(stream) for _ in range(4)]
    assert {sample.prompt for sample in early} == {1} and {sample.finish_reason for sample in early} == {"stop"}
    assert len(llm.engine.scheduler.running) == 1
    assert 200 - len(llm.engine.scheduler.pool.free) == len(llm.engine.scheduler.running[0].blocks) <= 11
    (last,) = stream
    assert (last.prompt, last.finish_reason, len(last.token_ids)) == (0, "length", 40)


# --- stream


def test_stream_yields_each_sample_when_it_ends(llm):
    """Samples held back until all are done, twice, or never."""
    limits = (5, 30, 1, 12)
    seen = []
    for sample in llm.stream(["ab", [9, 9]], SamplingParams(n=4, max_tokens=limits, seed=2, ignore_eos=True)):
        assert isinstance(sample, Completion) and len(sample.token_ids) == limits[sample.sample] == len(sample.logprobs)
        seen.append((sample.prompt, sample.sample))
        assert llm.engine.scheduler.unfinished >= 8 - len(seen) - 1
    assert sorted(seen) == list(product(range(2), range(4)))
    assert [sample for _, sample in seen] == [2, 2, 0, 0, 3, 3, 1, 1], "shortest first"


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_closed_early_aborts_the_rest(taken, llm):
    """Requests of an abandoned call that hold their blocks, or go on being computed in later calls."""
    params = SamplingParams(n=5, max_tokens=(2, 40, 40, 3, 40), seed=6, ignore_eos=True)
    with contextlib.closing(llm.stream([prompt_of(20, 1, 60)] * 5, params)) as stream:
        for _ in range(taken):
            next(stream)
        assert not taken or llm.engine.scheduler.unfinished >= 15
    everything_is_free(llm.engine)
    (output,) = llm.generate(["ab"], SamplingParams(n=2, temperature=0, max_tokens=4))
    assert [sample.token_ids for sample in output.samples] == [naive(FAMILIES["llama"], [3, 4], 4, stop={EOS})[0]] * 2


def test_a_second_stream_is_refused_while_one_is_open(llm):
    """Two streams that step one engine: each would silently drop the samples of the other that end in its steps."""
    params = SamplingParams(n=2, max_tokens=(2, 6), temperature=0, ignore_eos=True)
    stream = llm.stream(["ab"], params)
    assert next(stream).sample == 0
    with pytest.raises(RuntimeError, match="another stream of this LLM is unfinished .* read it to its end, or close it"):
        llm.generate(["cd"], params)
    (rest,) = stream
    assert rest.token_ids == naive(FAMILIES["llama"], [3, 4], 6)[0] and len(llm.generate(["cd"], params)[0].samples) == 2


def test_warming_up_leaves_no_trace(folders):
    """A warm-up that moves the random numbers of later calls, or whose bytes and hits are counted as theirs."""
    warmed, cold = (LLM(folders("llama"), seed=5, **SMALL) for _ in range(2))
    warmed.warm_up()
    assert not any(warmed.engine.take_counters().values())
    params = SamplingParams(n=3, max_tokens=6, ignore_eos=True)
    answers = [[sample.token_ids for sample in llm.generate(["abc"], params)[0].samples] for llm in (warmed, cold)]
    assert answers[0] == answers[1]


# --- refusals


@pytest.mark.parametrize("wrong", [
    {"n": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 1e-39}, {"top_k": -1},
    {"top_k": 1 << 31}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1}, {"max_tokens": 0},
    {"max_tokens": ()}, {"max_tokens": (3, 0), "n": 2}, {"max_tokens": (3, 3)}, {"max_tokens": [3], "n": 2}, {"stop": ""},
    {"stop": ("a", "")}, {"stop": ("a", 5)}, {"seed": -1}, {"seed": 1 << 63}, {"n": "2"}, {"n": True}, {"top_k": 2.5},
    {"top_p": None}, {"stop": None}, {"seed": 1.5}, {"max_tokens": 2.0}, {"max_tokens": (1, 2.0), "n": 2}], ids=str)
def test_every_wrong_parameter_is_named(wrong):
    """A NaN that blames the weights, an overflow in a step, an endless or empty response, instead of the field that caused it."""
    field = next(iter(wrong))
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} = .*: must be \w+"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("edge", [{"temperature": 1e-3}, {"temperature": 1e3}, {"top_k": (1 << 31) - 1}, {"top_p": 1e-45},
                                  {"min_p": 1.0}, {"seed": (1 << 63) - 1}, {"stop": "d"}, {"max_tokens": [3]}, {"n": 40}], ids=str)
def test_extreme_parameters_work(edge, llm):
    """A value at the edge of what is accepted that overflows or gives NaN in the step."""
    for sample in llm.generate([[9, 8, 7]], SamplingParams(**{"max_tokens": 3} | edge))[0].samples:
        assert sample.token_ids and all(math.isfinite(logprob) and logprob <= 0 for logprob in sample.logprobs)


@pytest.mark.parametrize("prompts, message", [
    (["ab", "a" * 64], r"prompt 1 has 64 tokens: it needs 1 to max_model_len - 1 = 63"), (["ab", ""], "prompt 1 has 0 tokens"),
    ([[], "ab"], "prompt 0 has 0 tokens"), ([[3, 64]], "prompt 0 .* ids from 0 to 63"), ("ab", "prompts = 'ab': give a list"),
    ([[3], [-1]], "prompt 1 .* ids from 0 to 63")], ids=str)
def test_a_prompt_that_does_not_fit_is_named(prompts, message, llm):
    """An index error inside the model, a rejected sample that looks like an empty answer, letters taken for prompts."""
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts)
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling params: give one for all, or one for each"):
        llm.generate(["ab", "cd"], [SamplingParams()] * 3)


@pytest.mark.parametrize("changed, message", [
    ({"max_num_sqs": 4}, "unknown key `actor.max_num_sqs` = 4; did you mean `actor.max_num_seqs`"), ({"tp": 0}, "`actor.tp` = 0"),
    ({"gpu_memory_utilization": 0.5}, "did you mean `actor.kv_memory_fraction`"), ({"tp": 2}, "`tp` = 2 needs as many ranks"),
    ({"max_model_len": 513}, "`max_model_len` = 513: must be .* max_position_embeddings = 512"), ({"kv_blocks": 3}, "kv_blocks"),
    ({"max_model_len": 1}, "`max_model_len` = 1"), ({"max_model_len": "long"}, "`max_model_len` = 'long'"), ({"seed": -1}, "seed"),
    ({"tp": 3}, "`actor.tp` = 3 does not divide config.json's num_attention_heads = 4"),
    ({"dtype": "float16"}, "`model.dtype` = 'float16'"), ({"exact": True, "dtype": "bfloat16"}, "`exact` needs `model.dtype`"),
    ({"max_num_seqs": 100}, "`actor.max_num_batched_tokens` = 64 is below `actor.max_num_seqs` = 100")], ids=str)
def test_a_wrong_setting_is_refused_by_name(changed, message, folders, monkeypatch):
    """A misspelt or impossible setting that is dropped, or that fails in a place where nobody recognises it."""
    if changed == {"tp": 3}:
        monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=message):
        LLM(folders("llama"), **SMALL | changed)


@pytest.mark.parametrize("fault, message", [
    ("none", "no config.json there"), ("model.safetensors", "no .safetensors there"), ("tokenizer.json", "no usable tokenizer"),
    ("wide", "tokenizer of 65 ids, model of 64 rows"), ("narrow", "`exact` needs widths that are multiples of 16"),
    ("cut", "is cut short"), ("other", "config.json ties lm_head.weight")])
def test_a_folder_that_is_none_is_refused(fault, message, folders, tmp_path):
    """A traceback out of torch, safetensors or transformers for a wrong path or a half-copied folder."""
    folder = tmp_path / "model"
    if fault != "none":
        write(folder, FAMILIES["llama-narrow" if fault == "narrow" else "llama"])
    if "." in fault:
        (folder / fault).unlink()
    elif fault == "wide":
        write(folder, FAMILIES["llama"], [*PIECES, "dddd"])
    elif fault == "cut":
        os.truncate(folder / "model.safetensors", 1000)
    elif fault == "other":
        described = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), exact=fault == "narrow", **SMALL)


# --- command line


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "actor.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_line_answers(folders):
    """The README's first command: answers of every prompt and sample, and its speed; one sequence at a time."""
    done = run("--model", folders("llama"), "--prompt", "a", "--prompt", "b", "--n", "2", "--max-tokens", "5", "--ignore-eos",
               "max_num_seqs=1", "max_model_len=32")
    assert done.returncode == 0, done.stderr
    for prompt, ids in (("a", [3]), ("b", [4])):
        right = text_of(naive(FAMILIES["llama"], ids, 5)[0])
        for number in range(2):
            assert re.search(rf"--- '{prompt}' \[{number}\] length, 5 tokens, logprob -\d+\.\d\d\n{right}\n", done.stdout)
    assert re.search(r"^20 tokens in [\d.]+ s: [\d.]+ tokens/s; decode steps read [\d.]+ GB/s, \d+% of a copy's", done.stdout, re.M)


def test_a_bad_folder_ends_the_command_line_with_one_line(tmp_path):
    """A traceback for a mistyped path, or an exit status that a script takes for success."""
    done = run("--model", str(tmp_path / "none"), "--prompt", "a")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: `model.path` = '.*/none': no config.json there; .*\n", done.stderr)


@pytest.mark.parametrize("arguments, message", [
    (["--chat"], "the tokenizer has no chat template"), (["max_num_sqs=1"], "max_num_sqs` = 1; did you mean `actor.max_num_seqs"),
    (["max_num_seqs"], "`actor.max_num_seqs` = None"), (["max_num_seqs=["], "while parsing"), (["max_num_seqs=0"], "num_seqs` = 0"),
    (["max_model_len=long"], "`max_model_len`"), (["--n", "0"], "SamplingParams.n = 0"), (["--top-p", "2"], "SamplingParams.top_p"),
    (["--stop", ""], "SamplingParams.stop"), (["--temperature", "nan"], "SamplingParams.temperature"), (["seed=-1"], "`seed` = -1"),
    (["--prompt", ""], "prompt 1 has 0 tokens")], ids=str)
def test_the_command_line_names_what_is_wrong(arguments, message, folders, capsys):
    """A typo that ends in a traceback, or is ignored."""
    assert main(["--model", folders("llama"), "--prompt", "ab", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and "Traceback" not in err


def test_every_option_of_the_command_line_arrives(tmp_path, capsys, monkeypatch):
    """An option that is parsed and forgotten: each of these changes the answer."""
    monkeypatch.setattr("actor.measure_copy_bandwidth", lambda device: 1e9)
    model = FAMILIES["llama"]
    folder = write(tmp_path, model, chat_template="dd{% for m in messages %}{{ m.content }}{% endfor %}c")

    def answer(*arguments: str) -> str:
        assert main(["--model", folder, "--prompt", "ab", "--max-tokens", "8", *arguments, "max_model_len=32"]) == 0
        return capsys.readouterr().out.split("\n")[1]

    greedy, drawing = text_of(naive(model, [3, 4], 8, stop={EOS})[0]), ("--temperature", "1")
    assert answer() == greedy and all(answer(*drawing, *cut.split()) == greedy for cut in ("--top-k 1", "--top-p 0", "--min-p 1"))
    assert answer("--stop", greedy[2:4]) == greedy[:greedy.find(greedy[2:4])]
    for seed in (0, 9):
        right = text_of(drawn(model, (seed, 0, 0), (3, 4), 8)[0])
        assert answer(*drawing, "--seed", str(seed)) == answer(*drawing, f"seed={seed}", "exact=true") == right
    assert answer("--chat") == text_of(naive(model, [6, 6, 3, 4, 5], 8, stop={EOS})[0])
