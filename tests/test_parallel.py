"""The model as an engine computes it: what every lane holds, what it multiplies with, and whole lanes on gloo.

References: slices by heads and columns written with torch.chunk, transformers, a full forward a token, the run of one lane.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from engines import naive, prompt_of, run, write
from ranks import ROOT, job, rows, spawn_ok, torchrun
from tiny import FAMILIES, hf_config, randomise
from transformers import AutoModelForCausalLM

import launch
import train
from actor import Engine
from config import ConfigError
from kernels.attention import PackedAttention
from ledger import Ledger
from model import Transformer, parameter_shapes
from parallel import EngineLinear, Lane, check_lanes, for_engine, lane_layout, packed_backend, refresh
from runner import uniforms
from scheduler import Request
from settings import build, parse
from shape import shape_from_hf
from transfer import make_plan, matrix

CPU = torch.device("cpu")
CASES = [(family, lanes) for family in FAMILIES for lanes in (1, 2, 4)]  # 4 query heads; 1, 2 or 4 KV heads


@functools.cache
def odd():
    """A vocabulary that no number of lanes divides: 61 rows are 31 + 30, or 16 + 16 + 16 + 13."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"].config), attn_implementation="eager")
    model.resize_token_embeddings(61, mean_resizing=False)
    return randomise(model.eval(), 61)


def reference_of(family: str):
    return odd() if family == "odd" else FAMILIES[family]


def parameters_of(reference) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in reference.named_parameters()}


def lane_model(shape, lane: Lane, backend: str, dtype=torch.float32) -> Transformer:
    """As the runner builds it; every live number is NaN until it is written."""
    with torch.device("meta"):
        model = Transformer(shape, shape.vocab)
        for_engine(model, lane, backend)
    model = model.to(dtype).to_empty(device=CPU).requires_grad_(False)
    model.tie()
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    return model


def fill(model: Transformer, layout, parameters: dict[str, torch.Tensor]) -> None:
    live = dict(model.named_parameters())
    for name, landings in layout.items():
        for at in landings:
            part = matrix(parameters[name])[at.row0:at.row1, at.col0:at.col1]
            matrix(live[at.tensor].data)[at.to_row:at.to_row + part.shape[0], at.to_col:at.to_col + part.shape[1]] = part


# --- what a lane holds


def held(shape, parameters: dict[str, torch.Tensor], rank: int, lanes: int) -> dict[str, torch.Tensor]:
    """A lane's tensors by Megatron's rule: whole heads, repeated where there are too few, columns of o and down."""
    D, K = shape.head_dim, shape.kv_heads

    def heads(part: str, kind: str) -> torch.Tensor:
        tensor = parameters[f"{at}self_attn.{part}_proj.{kind}"].unflatten(0, (-1, D))
        if part != "q":
            tensor = tensor.repeat_interleave(max(1, lanes // K), 0)
        return tensor.chunk(lanes)[rank].flatten(0, 1)

    tensors = {"model.norm.weight": parameters["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight")[:1 if shape.tied else 2]:
        tensors[name] = parameters[name].split(-(-shape.vocab // lanes))[rank]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias")[:2 if shape.qkv_bias else 1]:
            tensors[f"{at}self_attn.qkv_proj.{kind}"] = torch.cat([heads(part, kind) for part in "qkv"])
        halves = [parameters[f"{at}mlp.{part}_proj.weight"].chunk(lanes)[rank] for part in ("gate", "up")]
        tensors[f"{at}mlp.gate_up_proj.weight"] = torch.cat(halves)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            tensors[at + name] = parameters[at + name].chunk(lanes, 1)[rank]
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias",
                     "self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            if at + name in parameters:
                tensors[at + name] = parameters[at + name]
    return tensors


@pytest.mark.parametrize(("family", "lanes"), [*CASES, ("odd", 2), ("odd", 4)])
def test_lanes_hold_their_slices(family, lanes):
    """A row, column or head of the wrong lane, a bias cut that is whole, a fused tensor in another order, a gap."""
    reference = reference_of(family)
    shape, parameters = shape_from_hf(hf_config(reference)), parameters_of(reference)
    check_lanes(shape, lanes)
    layouts, targets = [], []
    for rank in range(lanes):
        model = lane_model(shape, Lane(rank, lanes), "plain")
        layouts.append(lane_layout(shape, rank, lanes))
        targets.append({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
        fill(model, layouts[-1], parameters)
        live, wanted = dict(model.named_parameters()), held(shape, parameters, rank, lanes)
        assert live.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(live[name], tensor), f"lane {rank}: {name}"
    plan = make_plan(parameter_shapes(shape), tuple(layouts), tuple(targets), (1, 3), (1 << 20, 8))
    everyone = list(range(lanes))
    for name in parameters:
        if name.endswith(("norm.weight", "o_proj.bias")):
            wanted = [[lane] for lane in everyone]
        elif ".k_proj." in name or ".v_proj." in name:
            sharers = max(1, lanes // shape.kv_heads)
            wanted = [everyone[first::sharers] for first in range(sharers)]
        else:
            wanted = [everyone]
        assert plan.copies(name) == wanted, name


@pytest.mark.parametrize(("lanes", "fields", "names"), [
    (3, {}, ["`actor.tp` = 3", "num_attention_heads = 4"]),
    (4, {"intermediate_size": 90}, ["`actor.tp` = 4", "intermediate_size = 90"]),
    (6, {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 72}, ["`actor.tp` = 6", "value_heads = 4"]),
    (8, {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 9}, ["`actor.tp` = 8", "vocabulary of 9"])])
def test_lanes_that_do_not_divide_the_model_are_refused(lanes, fields, names):
    """A head, a column or a vocabulary row cut in two, found as a shape error deep in a run on 8 GPUs."""
    with pytest.raises(ConfigError) as refused:
        check_lanes(shape_from_hf(hf_config(FAMILIES["llama"]) | {"head_dim": 16} | fields), lanes)
    assert all(name in str(refused.value) for name in names)


# --- what a lane multiplies with


@pytest.mark.parametrize("backend", ["plain", "onednn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_model_gives_the_logits_of_transformers(family, backend):
    """A bias added twice, or to the wrong part; gate and up, or q and k, exchanged; a head that lost its tie."""
    reference = FAMILIES[family]
    shape = shape_from_hf(hf_config(reference))
    model = lane_model(shape, Lane(), backend)
    fill(model, lane_layout(shape, 0, 1), parameters_of(reference))
    refresh(model)
    ids = torch.tensor(prompt_of(21, 5))
    with torch.no_grad():
        logits = model.next_logits(ids, torch.arange(21), PackedAttention([21], False, CPU), torch.arange(21))
        torch.testing.assert_close(logits, reference(ids[None]).logits[0], atol=1e-5, rtol=0)


def linear(size, backend: str, dtype=torch.float32) -> EngineLinear:
    """With outliers, so that one scale for all would not do."""
    layer, generator = EngineLinear(size, True, backend).to(dtype), torch.Generator().manual_seed(3)
    layer.weight.copy_(torch.randn(size, generator=generator) * torch.logspace(-2, 1, size[0])[:, None])
    layer.bias.copy_(torch.randn(size[0], generator=generator))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backend_chosen_for_a_dtype_multiplies_it_on_this_machine(dtype):
    """A CPU without AVX-512, on which oneDNN refuses to pack bf16: the engine ended at its first publication."""
    layer = linear((40, 24), packed_backend(dtype), dtype)
    layer.refresh()
    x = torch.randn(7, 24).to(dtype)
    exact, tolerance = x.double() @ layer.weight.double().T + layer.bias, 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(x).double(), exact, atol=tolerance * exact.abs().max().item(), rtol=tolerance)


@pytest.mark.parametrize("available,bf16,backends", [
    (True, True, ["onednn", "onednn"]), (True, False, ["onednn", "plain"]), (False, True, ["plain", "plain"])])
def test_nothing_is_packed_that_the_cpu_cannot_multiply(monkeypatch, available, bf16, backends):
    """The same choice on machines that this test does not run on."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    assert [packed_backend(dtype) for dtype in (torch.float32, torch.bfloat16)] == backends


def test_packed_copy_is_that_of_the_last_refresh():
    """A publication between two steps that half of the layers see: nothing changes until it is proved, then all does."""
    layer, x = linear((40, 24), "onednn"), torch.randn(7, 24)
    layer.refresh()
    before = x.double() @ layer.weight.double().T + layer.bias
    torch.testing.assert_close(layer(x).double(), before, atol=1e-5, rtol=1e-5)
    layer.weight.neg_()
    torch.testing.assert_close(layer(x).double(), before, atol=1e-5, rtol=1e-5)
    layer.refresh()
    torch.testing.assert_close(layer(x).double(), 2 * layer.bias.double() - before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(40, 24), (300, 200)])
def test_fp8_copy_within_its_rounding_and_in_place(size):
    """A scale of another block, a product with last version's codes, a copy whose new address a CUDA graph does not know."""
    layer, x = linear(size, "fp8"), torch.randn(7, size[1], generator=torch.Generator().manual_seed(4))
    layer.refresh()
    addresses = [tensor.data_ptr() for tensor in layer.derived]
    for change in (1.0, -3.0):
        layer.weight.mul_(change)
        layer.refresh()
        weight = layer.weight.double()
        gaps = (layer(x).double() - (x.double() @ weight.T + layer.bias)).abs()
        # e4m3 has 3 bits behind the point, so a weight moves by at most 1/16 of itself; below 2^-6 by half of 2^-9 x its scale.
        scales = torch.stack([torch.stack([block.abs().max() / 448 for block in part.split(128, 1)]) for part in weight.split(128)])
        smallest = scales.repeat_interleave(128, 0)[:size[0]].repeat_interleave(128, 1)[:, :size[1]] * 2.0**-10
        assert (gaps <= x.double().abs() @ torch.maximum(weight.abs() / 16, smallest).T + 1e-4).all()
        assert gaps.max() > 1e-3, "not quantised"
    assert [tensor.data_ptr() for tensor in layer.derived] == addresses


def test_fp8_quantises_all_linears_but_the_head():
    """Bytes that a decode step still reads in full, or logits of a head in 3 bits."""
    shape = shape_from_hf(hf_config(FAMILIES["qwen2-tied"]))
    backends = {name.rpartition(".")[2]: module.backend for name, module in lane_model(shape, Lane(), "fp8").named_modules()
                if isinstance(module, EngineLinear)}
    assert backends == {"qkv_proj": "fp8", "o_proj": "fp8", "gate_up_proj": "fp8", "down_proj": "fp8", "lm_head": "plain"}


# --- lanes on gloo: rank 0 learns and publishes, ranks 1-4 are one engine of four lanes, or two of two

PAIRS = (("llama", "llama-tied", "llama-narrow", "qwen2"), ("llama-bias", "mistral-window", "qwen3", "odd"))  # of two lanes each
FOUR = ("llama", "llama-bias", "qwen2", "qwen3", "odd")
BLOCKS = (40, 15, 30, 24)  # each lane's pool: the first lane's is not the smallest
FAULTS = {1: (2, "model.layers.1.mlp.down_proj.weight", 5, 7), 2: (1, "model.layers.0.self_attn.qkv_proj.weight", 20, 3),
          3: (3, "model.norm.weight", 9, 0)}  # version -> lane, its tensor, row, column of the flipped bit; row 20 is one of K


def requests_of(vocab: int) -> list[Request]:
    """Prompts of chunks and of one token, greedy and sampled; together more than the smallest pool."""
    work = [(1, 12, 0.0, 1), (22, 9, 0.0, 1), (7, 12, 1.0, 2), (18, 8, 0.7, 1)]
    return [Request(group, sample, prompt_of(length, group, vocab), new, temperature)
            for group, (length, new, temperature, samples) in enumerate(work) for sample in range(samples)]


def lane_engine(reference, lane: Lane, vocab: int) -> Engine:
    actor = {"tp": lane.size, "block_size": 4, "kv_blocks": BLOCKS[lane.rank], "max_num_seqs": 6, "max_num_batched_tokens": 14}
    settings = build({"seed": 8, "data": {"max_prompt_tokens": 24}, "rollout": {"max_new_tokens": 12}, "actor": actor})
    return Engine(settings, shape_from_hf(hf_config(reference)), vocab, CPU, Ledger(trace=False), lane)


def answers(engine: Engine, vocab: int) -> list:
    requests = requests_of(vocab)
    run(engine, requests)
    return [[request.tokens[request.num_prompt:], request.logprobs, request.preemptions] for request in requests]


def renewed():
    return randomise(copy.deepcopy(FAMILIES["llama"]), 77)


def serve(rank: int) -> dict:
    """One rank's part. Publications of whole engines with planted faults first, then families on two and on four lanes."""
    from channel import open_channel
    from sync import Grid, PublicationError, Publisher, agree_on_plan, make_groups
    settings = build({"model": {"path": "configs/toy"}, "actor": {"tp": 4}, "collective_timeout_s": 60})
    pairs, grid, channel = [dist.new_group(pair) for pair in ([1, 2], [3, 4])], Grid.of(settings), open_channel(rank, 100)
    reference = FAMILIES["llama"]
    shape, lane = shape_from_hf(hf_config(reference)), Lane(rank - 1, 4)
    engine = lane_engine(reference, lane, 64) if rank else None
    live = engine.weights() if engine else {}
    layout = (engine.runner.layout, {name: tuple(tensor.shape) for name, tensor in live.items()}) if engine else None
    plan = agree_on_plan(channel, settings, parameter_shapes(shape), layout)
    groups = make_groups(grid, plan, "cpu", 60)
    publisher, result = Publisher(channel, plan, groups, settings, CPU), {"problems": []}
    inner = publisher._report_live

    def faulty(version, tensors, seconds):
        at, name, row, column = FAULTS.get(version, (-1, "", 0, 0))
        if at == lane.rank:
            matrix(tensors[name]).view(torch.int32)[row, column] ^= 1
        inner(version, tensors, seconds)

    publisher._report_live = faulty
    for version in range(5):
        try:
            if rank == 0:
                publisher.send(version, parameters_of(renewed() if version == 4 else reference))
            else:
                publisher.receive(version, live)
            result["problems"].append("")
        except PublicationError as error:
            result["problems"].append(str(error))
    if rank == 0:
        for _ in range(4):
            channel.wait("served", "the lanes", 200)
        return result
    engine.connect(groups.lanes)
    engine.publish(4)
    result["published"] = answers(engine, 64)
    for size, families in ((2, PAIRS[(rank - 1) // 2]), (4, FOUR)):
        for family in families:
            reference, vocab = reference_of(family), 59 if family == "odd" else 64
            lane = Lane((rank - 1) % size, size)
            engine = lane_engine(reference, lane, vocab)
            engine.connect(groups.lanes if size == 4 else pairs[(rank - 1) // 2])
            write(engine, parameters_of(reference))
            engine.publish(0)
            result[f"{family} {size}"] = {"capacity": engine.scheduler.capacity, "answers": answers(engine, vocab)}
    channel.push("served", {})
    return result


@functools.cache
def expected(family: str) -> list:
    """(tokens, logprobs) of the textbook: a full forward a token, the running sum of probabilities, a uniform number each."""
    reference, vocab = (renewed(), 64) if family == "renewed" else (reference_of(family), 59 if family == "odd" else 64)
    return [naive(reference, request.tokens, request.max_new_tokens, request.temperature,
                  uniforms(8, [(request.group, request.sample, position) for position in range(12)]), vocab=vocab)
            for request in requests_of(vocab)]


def same_answers(found: list, family: str) -> None:
    for (tokens, logprobs, _), (wanted, logps) in zip(found, expected(family), strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(logps, abs=1e-5, rel=0)


@pytest.fixture(scope="module")
def served() -> list[dict]:
    return spawn_ok(5, "test_parallel:serve", timeout_s=250)


@pytest.mark.parametrize(("family", "size"), [*((family, 2) for family in PAIRS[0] + PAIRS[1]), *((family, 4) for family in FOUR)])
def test_lanes_give_the_tokens_of_a_full_recompute(served, family, size):
    """A sum or bias of one lane too many, ids of another lane's rows, a shared KV head; lanes that draw or schedule differently."""
    lanes = [result[f"{family} {size}"] for result in served if f"{family} {size}" in result]
    assert len(lanes) == size
    same_answers(lanes[0]["answers"], family)
    assert all(lane == lanes[0] for lane in lanes), "tokens and logprobs are the same bits on all lanes"
    assert {lane["capacity"] for lane in lanes} == {4 * 15}, "the smallest pool of all lanes"
    assert sum(preempted for _, _, preempted in lanes[0]["answers"]) > 0, "the pool was never short"


def test_publication_to_lanes(served):
    """Proof 2 with lanes: a bit in a slice, in a shared KV head, in a norm, each found by name; what follows is sound."""
    prefix = "publication of version {} is not what was sent: "
    wanted = ["", "model.layers.1.mlp.down_proj.weight differs on rank 1+2+3+4",
              "model.layers.0.self_attn.k_proj.weight differs on rank 2+4", "model.norm.weight differs on rank 4", ""]
    wanted = [text and prefix.format(version) + text for version, text in enumerate(wanted)]
    assert all(result["problems"] == wanted for result in served)
    same_answers(served[1]["published"], "renewed")
    assert all(result["published"] == served[1]["published"] for result in served[1:])


# --- the whole pipeline, by its command line

SHORT = ("steps=3", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8", "eval.every=3", "eval.max_prompts=8",
         "log.trackers=[]")


def trained(world: int, run_dir, *overrides: str) -> tuple[list[dict], list[dict]]:
    done = job(world, "configs/toy.yaml", f"run_dir={run_dir}", *SHORT, *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return rows(run_dir), rows(run_dir, "eval.jsonl")


@pytest.fixture(scope="module")
def one_lane(tmp_path_factory):
    return trained(2, tmp_path_factory.mktemp("one") / "run")


def same_run(found: tuple[list[dict], list[dict]], wanted: tuple[list[dict], list[dict]]) -> None:
    assert len(found[0]) == len(wanted[0]) == 3
    for row, other in zip(found[0], wanted[0], strict=True):
        assert all(row[key] == other[key] for key in ("reward", "response_len", "version", "truncated", "unscored"))
        assert row["logprob_gap_max"] < 1e-5 and row["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert [(row["version"], row["reward"]) for row in found[1]] == [(row["version"], row["reward"]) for row in wanted[1]]


def test_two_lanes_train_as_one(one_lane, tmp_path):
    """Lanes that take a message in different steps, a group that both grade, slices that miss an update."""
    same_run(trained(3, tmp_path / "run", "actor.tp=2"), one_lane)


@pytest.mark.long
@pytest.mark.parametrize("layout", [["actor.tp=4"], ["actor.tp=2", "actor.replicas=2"]])
def test_more_lanes_and_engines_train_as_one(one_lane, tmp_path, layout):
    """Groups of lanes that mix engines, a stream that reaches one lane of one engine."""
    same_run(trained(5, tmp_path / "run", *layout), one_lane)


@pytest.mark.long
def test_a_flipped_bit_on_lanes_ends_the_run(tmp_path):
    """Proof 2 in a real run of two lanes: every rank stops, with the parameter and both of its holders."""
    done = torchrun(3, "configs/toy.yaml", f"run_dir={tmp_path / 'run'}", "actor.tp=2", *SHORT, script="tests/flip.py")
    assert done.returncode != 0 and f'File "{ROOT / "train.py"}"' not in done.stderr
    assert "model.norm.weight differs on rank 1; model.norm.weight differs on rank 2" in done.stderr


@pytest.mark.parametrize(("learners", "engines", "tp", "local", "bad"), [
    (1, 1, 2, 3, ""), (1, 1, 2, 2, "ranks 1 to 2"), (2, 3, 2, 4, ""), (3, 2, 2, 4, "ranks 3 to 4"), (4, 3, 4, 8, ""),
    (2, 2, 4, 8, "ranks 6 to 9"), (1, 4, 1, 2, "")])
def test_an_engine_lies_on_one_machine(monkeypatch, capsys, learners, engines, tp, local, bad):
    """All-reduces of every layer of every token over the network between two machines, noticed only as a slow run."""
    layout = [f"learner.shards={learners}", f"actor.replicas={engines}", f"actor.tp={tp}"]
    settings = parse([str(ROOT / "configs/toy.yaml"), *layout])
    if not bad:
        launch.check_nodes(settings, local)
        return
    with pytest.raises(ConfigError, match=f"`actor.tp` = {tp}: {bad} share an engine .*{local} ranks"):
        launch.check_nodes(settings, local)
    monkeypatch.chdir(ROOT)
    for name, value in (("RANK", 0), ("WORLD_SIZE", learners + engines * tp), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, str(value))
    assert train.main(["configs/toy.yaml", *layout]) == 2 and bad in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "cores", "local", "threads"), [
    (["threads=5"], 16, 2, 5),
    ([], 16, 2, 16),  # one learner and one actor take turns
    (["max_staleness=1"], 16, 2, 8),  # and here they do not
    (["actor.tp=4"], 16, 5, 4),
    (["actor.replicas=2", "actor.tp=2", "learner.shards=2"], 16, 6, 4),
    (["learner.shards=8"], 16, 9, 2),
    (["actor.replicas=2", "actor.tp=2", "learner.shards=2", "max_staleness=1"], 17, 6, 2),
    (["actor.replicas=4"], 2, 5, 1),  # fewer cores than ranks
    (["learner.shards=16", "actor.replicas=16"], 64, 8, 8),  # four machines of 8 ranks
    (["exact=true"], 16, 2, 2),
    (["exact=true", "actor.replicas=4"], 4, 5, 1)])
def test_threads_of_a_rank(overrides, cores, local, threads):
    """Ranks that fight for cores, or leave them idle while the other side waits."""
    settings = parse([str(ROOT / "configs/toy.yaml"), "threads=0", *overrides])
    assert launch.threads_per_rank(settings, cores, local) == threads
