"""Where actors and learners go: plan.py's searches against every placement tried one by one, and `placement=auto`."""

import dataclasses
import itertools

import pytest
from test_shape import TABLE

import costs
import plan
from config import ConfigError
from costs import Workload, actor_memory, learner_memory, train_seconds
from hardware import SHEETS
from settings import build, parse
from shape import shape_from_hf
from sheet import case_of, derive

YAML = "configs/llama3.1-70b-64xh100.yaml"
SHAPES = {name: shape_from_hf(row[0]) for name, row in TABLE.items()}
SEVENTY = SHAPES["Llama-3.1-70B"]


@pytest.mark.parametrize("name, gpus, mode, sheet", [
    ("Llama-3.1-8B", 8, "sync", "h100"), ("Llama-3.1-8B", 16, "one_step", "h100"), ("Qwen3-32B", 24, "async", "h200"),
    ("Qwen2.5-7B", 12, "sync", "a100"), ("Llama-3.1-70B", 16, "one_step", "h200"), ("Llama-3.1-70B", 8, "sync", "h100")])
def test_the_search_equals_trying_everything(name, gpus, mode, sheet):
    """Every (engines, TP, copies, shards) that uses all GPUs; a placement that does not fit is no answer."""
    shape, machine = SHAPES[name], SHEETS[sheet]
    config = build({"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 512}, "plan": {"mean_response": 1024},
                    "rollout": {"prompts_per_step": 64, "max_new_tokens": 4096},
                    "learner": {"shards": gpus - 1, "activation_checkpointing": "full"}})
    work, found = Workload.of(config), {}
    context = work.running_context()
    for replicas, tp, copies, shards in itertools.product(range(1, gpus), range(1, 9), range(1, gpus), range(1, gpus)):
        learners = copies * shards
        if replicas * tp + learners != gpus or tp not in (1, 2, 4, 8) or shape.heads % tp or (copies > 1 and shards % 8):
            continue
        if shape.kv_heads % tp and tp % shape.kv_heads:
            continue
        there = build({"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 512}, "plan": {"mean_response": 1024},
                       "rollout": {"prompts_per_step": 64, "max_new_tokens": 4096}, "actor": {"replicas": replicas, "tp": tp},
                       "learner": {"replicas": copies, "shards": shards, "activation_checkpointing": "full"}})
        pool = actor_memory(there, shape, machine, tp)
        tokens = pool["kv"] * min(tp, shape.kv_heads) / shape.kv_bytes_per_token(2)
        if sum(pool.values()) > 0.95 * machine.memory or tokens < 4608:
            continue
        if sum(learner_memory(there, shape, machine, copies, shards).values()) > 0.95 * machine.memory:
            continue
        generate = costs.mean_field(there, shape, machine, context)
        train = train_seconds(there, shape, machine, work, copies, shards).total
        found[replicas, tp, copies, shards] = generate + train if mode == "sync" else max(generate, train)
    best = costs.search(config, shape, machine, mode)
    if not found:
        assert best is None
    else:
        assert best[0] == pytest.approx(min(found.values())) == pytest.approx(found[best[1]])


def test_the_colocated_search_equals_trying_everything():
    """Every way in which all GPUs are both; gradients and activations share a GPU with the engine's weights."""
    shape, machine, gpus = SHAPES["Llama-3.1-8B"], SHEETS["h200"], 16
    settings = {"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 512}, "plan": {"mean_response": 1024},
                "rollout": {"prompts_per_step": 64, "max_new_tokens": 4096}, "placement": "colocated"}
    found = {}
    for tp, shards in itertools.product((1, 2, 4, 8), (8, 16)):
        there = build(settings | {"actor": {"replicas": gpus // tp, "tp": tp}, "learner": {
            "replicas": gpus // shards, "shards": shards, "activation_checkpointing": "full"}})
        if sum(costs.colocated_memory(there, shape, machine).values()) <= 0.95 * machine.memory:
            work = Workload.of(there)
            found[gpus // tp, tp, gpus // shards, shards] = (
                costs.mean_field(there, shape, machine, work.running_context())
                + train_seconds(there, shape, machine, work, gpus // shards, shards).total)
    best = costs.search_colocated(there, shape, machine)
    assert len(found) > 3 and best[0] == pytest.approx(min(found.values())) == pytest.approx(found[best[1]])


def test_a_colocated_gpu_holds_both():
    """The pool shares what masters and moments leave; released, weights and pool are not there while it learns."""
    settings = {"model": {"dtype": "bfloat16"}, "placement": "colocated", "data": {"max_prompt_tokens": 1024},
                "rollout": {"max_new_tokens": 3072}, "actor": {"tp": 8},
                "learner": {"shards": 8, "activation_checkpointing": "full"}}
    shape, machine = SHAPES["Llama-3.1-8B"], SHEETS["h100"]
    kept, released = (costs.colocated_memory(build(settings | {"actor": {"tp": 8, "release_memory": release}}), shape, machine)
                      for release in (False, True))
    learner = learner_memory(build(settings), shape, machine, 1, 8)
    assert kept == learner | {kind: kept[kind] for kind in ("weights", "derived", "kv", "graphs")}
    pool = 0.3 * (machine.memory - sum(learner[kind] for kind in ("masters", "moments", "reference")))
    assert 0 < kept["kv"] <= pool and kept["weights"] == shape.parameters * 2 / 8
    assert sum(released.values()) < sum(kept.values()) - kept["weights"]


def test_auto_placement_says_why():
    """`placement=auto` takes the search's best for the world that was started, and names what it was better than."""
    config = parse([YAML, "placement=auto", "actor.release_memory=true", "actor.kv_memory_fraction=0.3"])
    for staleness, mode in ((0, "sync"), (1, "one_step")):
        config = dataclasses.replace(config, max_staleness=staleness, plan=dataclasses.replace(config.plan, hardware="h100"))
        chosen, why = plan.place(config, 64)
        split = costs.search(costs.placed(config, (1, 1, 1, 63)), SEVENTY, SHEETS["h100"], mode)
        together = costs.search_colocated(costs.placed(config, (1, 1, 1, 64), True), SEVENTY, SHEETS["h100"])
        best = min(split, together) if mode == "sync" else split
        assert chosen == costs.placed(config, best[1], best is together) and chosen.world_size == 64
        assert f"placement=auto, {mode}, 64 x h100, derived" in why and f"{best[1][0]} engines of TP {best[1][1]}" in why
        assert ("against" in why) == (mode == "sync")
    greedy = dataclasses.replace(config, max_staleness=0, actor=dataclasses.replace(config.actor, release_memory=False))
    assert "colocated does not fit" in plan.place(greedy, 64)[1], "weights and pool stay beside what learns"
    with pytest.raises(ConfigError, match="no placement of .* on 2 x h100 fits"):
        plan.place(config, 2)
    chosen, why = plan.place(parse(["placement=auto"]), 1)
    assert chosen.placement == "colocated" and chosen.world_size == 1 and "one rank must be both" in why
    with pytest.raises(ConfigError, match="`placement` = auto needs to know the machine"):
        plan.place(parse(["placement=auto"]), 2, "")
    assert "4 x h200" in plan.place(parse(["placement=auto"]), 4, "NVIDIA H200")[1]


def test_auto_placement_chooses_what_the_config_allows():
    """A choice that is refused afterwards, or cannot run on these machines, is one that a user cannot act on."""
    small = [YAML, "placement=auto", "model.path=configs/toy", "max_staleness=0"]
    assert plan.place(parse([*small, "exact=true", "model.dtype=float32", "actor.tp=1"]), 8)[0].actor.tp == 1
    free = plan.place(parse(small), 8)[0]
    assert free.placement == "colocated" and plan.place(parse([*small, "publish.mode=staged"]), 8)[0].placement == "split"
    large = parse([YAML, "placement=auto", "max_staleness=0", "actor.release_memory=true", "actor.kv_memory_fraction=0.3"])
    assert plan.place(large, 64, local=8)[0].actor.tp == 8 and plan.place(large, 64, local=4)[0].actor.tp <= 4
    with pytest.raises(ConfigError, match="`max_staleness` = 1 with `placement` = colocated"):
        plan.place(parse(["placement=auto", "max_staleness=1"]), 1)


@pytest.mark.parametrize("released", [True, False])
def test_the_page_of_a_colocated_run(released):
    """All GPUs work in both phases: no GPU is an actor's alone, none idles for the other side, and no mode overlaps."""
    found = derive(case_of(parse([YAML, "placement=colocated", "max_staleness=0", "actor.replicas=8", "learner.shards=64",
                                  "actor.kv_memory_fraction=0.3", f"actor.release_memory={released}"]))).tree()
    assert found["memory_bytes"].keys() == found["fits"].keys() == {"colocated"} and found["fits"]["colocated"] == released
    assert found["step_s"] == {"sync": found["generate_s"] + found["train_s"] + found["publish_now_s"]}
    assert found["idle"] == {"sync": {"ranks": pytest.approx(0.0, abs=1e-9)}} and "ratio" not in found
    assert found["tokens_per_s_per_gpu"] == pytest.approx(512 * 16 * 4096 / found["step_s"]["sync"] / 64)
