"""plan.py against FACTS.md, torch's FLOP counter, autograd's memory, a naive simulation, and every placement tried one by one."""

import dataclasses
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_shape import TABLE
from torch.utils.flop_counter import FlopCounterMode

import costs
import hardware
import plan
from config import ConfigError
from costs import Costs, Workload, actor_memory, fits, learner_memory, roll
from hardware import SHEETS, Hardware, along, load_hardware
from kernels.attention import PackedAttention
from kernels.logprob import Head
from model import Transformer
from runner import working_bytes
from settings import build, parse
from shape import shape_from_hf
from sheet import case_of, predict

YAML = "configs/llama3.1-70b-64xh100.yaml"
SHAPES = {name: shape_from_hf(row[0]) for name, row in TABLE.items()}
SEVENTY = SHAPES["Llama-3.1-70B"]
TINY = shape_from_hf({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 176, "vocab_size": 96,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu"})


def predicted(*overrides: str) -> dict:
    case = case_of(parse([YAML, *overrides]))
    return predict(case.config, case.shape, case.hardware, case.work)


@pytest.fixture(scope="module")
def seventy() -> dict:
    return predicted()


# --- FLOPs and bytes


@pytest.mark.parametrize("name", TABLE)
def test_params_and_bytes_of_published_models(name):
    """FACTS: counts exactly, whatever the family; a plan for the wrong model is worse than none."""
    config, shape = parse([YAML]), SHAPES[name]
    found = predict(config, shape, SHEETS["h200"], Workload.of(config))
    assert (found["params"], found["matmul_params"], found["kv_bytes_per_token"]) == TABLE[name][1:]
    assert found["weight_bytes"] == 2 * TABLE[name][1] and found["checkpoint_bytes"] == 12 * TABLE[name][1]


def test_flops_equal_torchs_counter_in_its_own_convention():
    """FlopCounterMode counts eager attention's full square: forward, and twice that backward."""
    model, S = Transformer(TINY, TINY.vocab), 24

    class Eager:
        positions = torch.arange(S)

        def __call__(self, q_THD, k_TKD, v_TKD, layer, window):
            repeat = q_THD.shape[1] // k_TKD.shape[1]
            q, k, v = (x.transpose(0, 1) for x in (q_THD, k_TKD.repeat_interleave(repeat, 1), v_TKD.repeat_interleave(repeat, 1)))
            return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).transpose(0, 1)

    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with FlopCounterMode(display=False) as forward:
        hidden_TE = model.model(torch.arange(S), Eager.positions, Eager())
        loss = model.lm_head(hidden_TE).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == TINY.forward_flops(S, S * S)
    assert forward.get_total_flops() + backward.get_total_flops() == 3 * TINY.forward_flops(S, S * S)


def test_the_causal_convention_is_megatrons():
    """Megatron-Bridge publishes 736 TFLOP/s at 1639 tokens/s for the 70B at 8k: 449 GFLOP a token."""
    work = Workload(1, 1, 0, 8192, 0, 8192)
    assert costs.learner_flops(SEVENTY, work) == pytest.approx(736e12 / 1639, rel=2e-3)


def test_torchtitans_mfu():
    """331 tokens/s/GPU on 64 A100 at 8k is published as 51.7 % in PaLM's convention: full square, all parameters."""
    full = 3 * SEVENTY.forward_flops(1, 8192) + 6 * (SEVENTY.parameters - SEVENTY.matmul_parameters)
    assert 331 * full / SHEETS["a100"].flops == pytest.approx(0.517, abs=0.01)


def test_where_decode_stops_being_memory_bound():
    """FACTS: 153, 295, 206 and 292 samples (of 2 bytes); KV reads equal weights at 424k tokens of the 70B."""
    for name, batch in {"a100": 153, "h100": 295, "h200": 206, "b200": 281}.items():  # b200: 292 at a queried 7.67 TB/s
        found = predicted(f"plan.hardware={name}")
        assert round(found["batch_where_compute_bound"]) == batch
    assert found["context_where_kv_is_weights"] == pytest.approx(424e3, rel=2e-3)


# --- decode


@pytest.mark.parametrize("sheet, tp, batch, seconds", [
    ("h100", 8, 64, 14.5e-3), ("h100", 8, 128, 18.0e-3), ("h100", 8, 256, 26.6e-3), ("h200", 4, 128, 22.8e-3),
    ("h200", 4, 256, 36.4e-3)])
def test_decode_steps_of_the_worked_example(sheet, tp, batch, seconds):
    assert Costs(SEVENTY, SHEETS[sheet], tp, 2).decode(batch, batch * 3072) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("model, sheet, tp, batch, context, fp8, seconds", [
    ("Llama-3.1-70B", "h100", 2, 64, 1536, True, 28.8e-3), ("Llama-3.1-70B", "h100", 4, 64, 1536, True, 19.5e-3),
    ("Llama-3.1-70B", "h100", 8, 64, 1536, True, 15.5e-3), ("Qwen3-8B", "h200", 1, 128, 3072, False, 19.0e-3),
    ("Llama-3.1-8B", "a100", 1, 1, 100, False, 1 / 93.9), ("Llama-3.1-70B", "a100", 4, 1, 100, False, 1 / 37.5),
    ("Llama-3.1-70B", "a100", 8, 1, 100, False, 1 / 58.8)])
def test_published_serving_points(model, sheet, tp, batch, context, fp8, seconds):
    """Within 30 %. Of the served ones (1024 in, 1024 out), each step also prefills a token for each that it decodes."""
    engine = Costs(SHAPES[model], SHEETS[sheet], tp, 2, fp8)
    served = engine.prefill(batch, 512) if fp8 else 0.0
    assert engine.decode(batch, batch * context) + served == pytest.approx(seconds, rel=0.30)


@pytest.mark.parametrize("name, sheet, tp", list(itertools.product(("Llama-3.1-70B", "Qwen3-8B"), SHEETS, (1, 2, 4, 8))))
def test_nothing_is_faster_than_its_roofline(name, sheet, tp):
    """An efficiency above 1 is a formula that counts something twice or not at all."""
    shape, machine = SHAPES[name], SHEETS[sheet]
    engine = Costs(shape, machine, tp, 2)
    for batch, context in itertools.product((1, 32, 256, 2048), (128, 4096, 65536)):
        flops = shape.forward_flops(batch, batch * context)
        read = 2 * shape.matmul_parameters + batch * context * shape.kv_bytes_per_token(2)
        assert engine.decode(batch, batch * context) > max(flops / (tp * machine.flops), read / (tp * machine.bandwidth))
        assert engine.prefill(batch, context) > flops / (tp * machine.flops)
    shares = (hardware.STREAM, hardware.READ_KV, hardware.MULTIPLY, hardware.PREFILL, hardware.LINK,
              machine.gemm_flops / machine.flops)
    assert all(0 < share <= 1 for share in shares)


@pytest.mark.parametrize("sigma, cap", [(1.0, 16384), (0.5, 32768), (2.0, 8192)])
def test_lengths_are_the_quantiles_of_a_lognormal_that_has_the_mean_once_cut(sigma, cap):
    """E[min(X, c)] = exp(mu + s^2 / 2) Phi((ln c - mu) / s - s) + c Phi((mu - ln c) / s); as many samples as 1,024 GPUs take."""
    work, normal = Workload(8192, 16, 1024, 4096, sigma, cap), statistics.NormalDist()
    lengths = sorted(work.lengths())
    mu = math.log(lengths[work.count // 10]) - sigma * normal.inv_cdf(0.1)
    edge = (math.log(cap) - mu) / sigma
    assert math.exp(mu + sigma**2 / 2) * normal.cdf(edge - sigma) + cap * normal.cdf(-edge) == pytest.approx(4096, rel=2e-3)
    assert lengths.count(cap) / work.count == pytest.approx(normal.cdf(-edge), abs=1e-3)
    for share in (0.3, 0.5, 0.9):
        assert lengths[int(share * work.count)] == pytest.approx(min(cap, math.exp(mu + sigma * normal.inv_cdf(share))), rel=2e-3)


def naive(engine: Costs, work: Workload, lengths: tuple[int, ...], slots: int) -> float:
    """One step at a time: every running sample gets a token, and who is done makes room. First tokens come out of prefill."""
    queue, running, seconds = list(lengths), [], 0.0
    while queue or running:
        while queue and len(running) < slots:
            running.append([queue.pop(0), 1])
        running = [each for each in running if each[1] < each[0]]
        if not running or (queue and len(running) < slots):
            continue
        seconds += engine.decode(len(running), sum(work.prompt + done for _, done in running))
        for each in running:
            each[1] += 1
    return seconds


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_samples_played_through_slots_equal_a_naive_simulation(slots):
    """Events instead of steps: the arithmetic between two events must be that of the steps it stands for."""
    work = Workload(8, 8, 100, 300, 1.0, 2000)
    engine, lengths = Costs(SEVENTY, SHEETS["h100"], 8, 2), work.lengths()
    assert len(lengths) == 64 and sum(lengths) / 64 == pytest.approx(300, rel=0.01) and max(lengths) == 2000
    assert roll(engine, work, lengths, slots).seconds == pytest.approx(naive(engine, work, lengths, slots), rel=1e-3)


@pytest.mark.parametrize("replicas, cap, loss", [(3, 16384, 0.12), (8, 32768, 0.37)])
def test_tail_loss(replicas, cap, loss):
    """FACTS: 12 % and 37 % at sigma 1; and ROLL Flash's bound T <= Q/K mu + L."""
    found = predicted(f"actor.replicas={replicas}", f"rollout.max_new_tokens={cap}", "plan.decode_tokens_per_gpu=0")
    assert found["tail_loss"] == pytest.approx(loss, abs=0.04)
    assert found["generate_s"] == found["generate_derived_s"] <= found["generate_bound_s"]
    equal = predicted("plan.length_sigma=0", f"actor.replicas={replicas}", "plan.decode_tokens_per_gpu=0")
    assert equal["tail_loss"] < found["tail_loss"]


# --- the worked example


def test_worked_example(seventy):
    """FACTS, given 1,100 tokens/s/GPU and 40 % MFU: within 10 %."""
    close = {"rel": 0.10}
    assert seventy["generate_flops"] == pytest.approx(4.93e18, rel=0.01)
    assert seventy["train_flops"] == pytest.approx(1.83e19, rel=0.01)
    assert seventy["generate_s"] == pytest.approx(1268, **close) and seventy["train_s"] == pytest.approx(1159, **close)
    assert seventy["step_s"]["sync"] == pytest.approx(2426, **close) and seventy["step_s"]["async"] == pytest.approx(1268, **close)
    assert seventy["idle"]["sync"] == {"actors": pytest.approx(0.48, abs=0.03), "learners": pytest.approx(0.52, abs=0.03)}
    over_all = (24 * seventy["idle"]["async"]["actors"] + 40 * seventy["idle"]["async"]["learners"]) / 64
    assert over_all == pytest.approx(0.05, abs=0.02)
    assert seventy["ratio"] == pytest.approx(24 / 40) and seventy["placement"]["tp"] == 8
    assert seventy["checkpoint_bytes"] == pytest.approx(847e9, rel=0.01)
    assert seventy["weight_bytes"] == pytest.approx(141.1e9, rel=0.001)
    assert seventy["fits"] == {"actor": True, "learner": True}


def test_without_givens_the_engine_is_slower_than_its_average(seventy):
    """FACTS: 850 to 1,050 tokens/s/GPU in practice, where lengths differ; 1,100 and more where they do not."""
    assert 850 <= seventy["decode_tokens_per_gpu"]["derived"] <= 1050
    assert predicted("plan.length_sigma=0")["decode_tokens_per_gpu"]["derived"] > 1100


def test_publication_of_the_worked_example(seventy):
    """FACTS: 2.8 s through one card, .35 s over 8 rails, .31 s by one root on NVLink; nothing beats the engine's own cards."""
    ways, over = seventy["publish_s"], seventy["publish_over"]
    assert ways["one_root"] == pytest.approx(2.8, rel=0.02) and ways["rails"] == pytest.approx(0.35, rel=0.02)
    assert over["nvlink"]["one_root"] == pytest.approx(0.31, rel=0.02)
    assert ways["gather"] > ways["one_root"] > ways["lanes"] >= ways["rails"] and ways["fp8"] < ways["lanes"]
    assert ways["lanes"] == pytest.approx(2 * ways["rails"])  # 40 shards hand over to 8 roots first
    assert predicted("learner.shards=8", "learner.replicas=5")["publish_s"]["lanes"] == pytest.approx(ways["rails"])
    assert all(seconds >= 141.1e9 / 12.5e9 for seconds in over["ethernet"].values())


# --- memory


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_are_what_autograd_keeps(checkpointing):
    """Bytes saved for backward, by layer: one hidden state under full checkpointing (two if the residual were kept apart)."""
    def kept(layers: int) -> int:
        model, storages = Transformer(dataclasses.replace(TINY, layers=layers, windows=(0,) * layers), TINY.vocab), {}
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        for layer in model.model.layers:
            layer.recompute = checkpointing

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = (storage.nbytes(), storage)  # held, or its address is used again
            return tensor

        attend = PackedAttention([128] * 2, False, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.zeros(256, dtype=torch.long), attend, torch.arange(8), torch.zeros(8, dtype=torch.long), Head(1.0, 96, 8))
        return sum(size for size, _ in storages.values())

    layer = TINY.hidden if checkpointing == "full" else costs.layer_elements(TINY, fused=False)
    assert (kept(5) - kept(3)) / 2 == pytest.approx(256 * 4 * layer, rel=0.01)


def test_optimizer_state_is_16_bytes_a_parameter():
    """Masters, gradients and moments as torch holds them."""
    model, config = Transformer(TINY, TINY.vocab), build({})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    held = sum(2 * parameter.nbytes + sum(state.nbytes for key, state in optimizer.state[parameter].items() if key != "step")
               for parameter in model.parameters())
    memory = learner_memory(config, TINY, SHEETS["h100"], 1, 1)
    assert held == memory["masters"] + memory["gradients"] + memory["moments"] == 16 * TINY.parameters
    four = build({"algorithm": {"name": "ppo"}, "reward_model": {"path": "rm"}})
    assert learner_memory(four, TINY, SHEETS["h100"], 1, 1) == memory | {
        "critic": held, "reference": 4 * TINY.parameters, "reward_model": 4 * TINY.parameters}


def test_working_space_is_what_the_engine_reserves():
    for overrides in ({}, {"max_num_seqs": 64}, {"max_num_batched_tokens": 8192}):
        config = build({"model": {"dtype": "bfloat16"}, "actor": overrides})
        kinds = actor_memory(config, SEVENTY, SHEETS["h100"], 1)
        assert kinds["working"] + kinds["staging"] == working_bytes(SEVENTY, config)


def test_moments_in_8_bits_or_on_the_host():
    kinds = [learner_memory(build({"learner": settings}), SEVENTY, SHEETS["h200"], 1, 8)["moments"] / SEVENTY.parameters * 8
             for settings in ({}, {"moments": "8bit"}, {"offload_moments": True})]
    assert kinds == [8, pytest.approx(2, rel=0.1), 0]


def test_a_70b_learner_on_8_of_141_gb():
    """FACTS: AdamW on fp32 masters does not fit without offload."""
    settings = {"data": {"max_prompt_tokens": 1024}, "rollout": {"max_new_tokens": 1024}, "model": {"dtype": "bfloat16"}}
    for offload in (False, True):
        config = build(settings | {"learner": {"shards": 8, "activation_checkpointing": "full", "offload_moments": offload}})
        assert fits(learner_memory(config, SEVENTY, SHEETS["h200"], 1, 8), SHEETS["h200"]) == offload
    table = plan.fit_table().splitlines()
    assert len(table) == 10 and table[2].startswith("1 x  24 GB") and table[2].split()[-1] == "-"
    assert float(table[5].split()[4]) > 6, "a 7B fits one H200 with fp32 moments (122 GB)"


# --- calibration, comparison, command line


def test_a_calibrated_machine_is_predicted_from_its_curves(tmp_path):
    """Curves replace sheet and shares on both sides, and the page says that they were measured."""
    curves = {"process": 2e8, "prefill": [[8, 0.01], [800, 0.5]], "decode": [[1, 0.002], [101, 0.102]], "decode_context": 10,
              "context_s": 1e-6, "forward": [[100, 1.0], [200, 2.0]], "backward": [[100, 2.0], [200, 4.0]], "optimizer_s": 0.25,
              "publish_s": 0.5, "sample_s": 1e-3, "beside_s": 0.01}
    machine = Hardware("here", 1e11, 1e11, 1e11, 1e10, 2e10, 1e9, 1e9, curves, "measured on toy")
    file = tmp_path / "here.json"
    file.write_text(json.dumps(dataclasses.asdict(machine)))
    assert load_hardware(str(file)) == dataclasses.replace(machine)
    config = parse(["configs/toy.yaml", "rollout.samples_per_prompt=2", "plan.mean_response=3", "plan.length_sigma=0",
                    "plan.mean_prompt=5", "learner.max_tokens_per_micro_batch=128"])
    found = predict(config, TINY, machine, Workload.of(config))
    assert found["prefill_s"] == pytest.approx(0.01 + (160 - 8) * 0.49 / 792)  # 32 prompts of 5, too short to share
    assert found["generate_s"] - found["prefill_s"] == pytest.approx(sum(0.033 + 1e-6 * 32 * (keys - 10) for keys in (6, 7)))
    assert found["train_s"] == pytest.approx(2 * 3 * 1.28 + 0.25)  # 256 tokens in two micro-batches
    assert found["publish_now_s"] == 0.5
    assert found["step_s"]["sync"] == pytest.approx(found["generate_s"] + found["train_s"] + 0.5 + 0.01 + 32 * 1e-3)


def test_along_is_piecewise_linear():
    curve = [[1, 3.0], [10, 5.0], [100, 95.0]]
    for size in (1, 4, 10, 55, 100):
        assert along(curve, size) == pytest.approx(np.interp(size, *zip(*curve, strict=True)))
    assert along(curve, 200) == pytest.approx(195.0) and along([[10, 2.0]], 5) == 1.0


def test_comparison_names_predicted_measured_and_error(seventy):
    row = {"step_s": 2000.0, "staleness_max": 0, "t_actor_decode": 1000.0, "t_actor_prefill": 21.0, "t_learner_forward": 300.0,
           "t_learner_backward": 700.0, "t_learner_optimizer": 160.0, "publish_s": 1.412, "mem_actor_peak_mb": 80e3}
    found = plan.compare(seventy, [row, row | {"step_s": 9e9}, row], "sync")
    lines = {line[:20].strip(): line.split()[-1] for line in plan.comparison(found).splitlines()}
    assert lines["step"] == "+21.5%" and lines["decode and prefill"] == "+24.5%" and lines["learner"] == "-0.1%"
    assert lines["publication"] == "-50.0%" and lines["peak memory, actor"] == "-6.7%" and "peak memory, learner" not in lines


def test_a_run_is_compared_without_its_first_step_if_it_has_others():
    """Kernels are compiled in the first step; a run of none, or one that had nothing left to do, must end all the same."""
    config, machine = parse(["configs/toy.yaml", "placement=colocated"]), load_hardware("h100")
    row = {"prompt_len": 5.0, "response_len": 5.0, "truncated": 0.0, "step_s": 2.0, "t_colocated_decode": 1.0, "mem_peak_mb": 600.0}
    assert plan.afterwards(config, [], machine) == "no step was run: nothing to hold against the predictions"
    for rows, steps in (([row], "one step"), ([row | {"step_s": 7.0}, row, row], "medians of 2 steps")):
        table = plan.afterwards(config, rows, machine)
        assert steps in table and re.search(r"step +\S+ \w+ +2 s", table)


@pytest.mark.parametrize("length, cut", [(1.0, 1.0), (8.0, 1.0), (1.5, 0.0)])
def test_a_run_of_any_lengths_is_compared(length, cut):
    """Answers of one token, which come out of the prefill without a decode step, or all of them cut."""
    row = {"prompt_len": 1.0, "response_len": length, "truncated": cut, "step_s": 2.0}
    assert "2 s" in plan.afterwards(parse(["configs/toy.yaml"]), [row], load_hardware("h100"))


def test_a_lone_rank_publishes_at_the_speed_of_a_copy():
    """It has no link: infinite bytes a second would predict nothing at all."""
    config = parse(["configs/toy.yaml", "placement=colocated"])
    machine = plan.machine_of(config, "2 CPU cores", {"flops": 1e11, "bandwidth": 8e9, "link": 0.0, "memory": 8e9, "process": 1e8})
    case = dataclasses.replace(case_of(config), hardware=machine)
    assert predict(case.config, case.shape, machine, case.work)["publish_now_s"] == pytest.approx(102720 * 4 * 4 / 8e9)


def main(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "plan.py", *arguments], capture_output=True, text=True, cwd=Path(plan.__file__).parent)


def test_command_line(tmp_path):
    """One command before a GPU is rented, without torch; an unknown machine or key is refused with what there is."""
    page = main(YAML)
    assert page.returncode == 0 and "derived from the vendor's sheet, not measured" in page.stdout and "NO" not in page.stdout
    found = json.loads(main(YAML, "--json").stdout)
    assert {"params", "weight_bytes", "kv_bytes_per_token", "decode_step_s", "generate_s", "train_s", "ratio"} <= found.keys()
    assert found["idle"].keys() == {"sync", "one_step", "async"} and found["hardware"]["origin"].endswith("not measured")
    assert {"gather", "one_root", "rails", "lanes"} <= found["publish_s"].keys()
    assert {"prefill", "decode", "learner"} <= found["flops_per_token"].keys()
    explained = main(YAML, "--explain", "flops_per_token.decode").stdout
    assert "69,501,714,432 + 4 x 80 x 64 x 128 x 3,072 keys" in explained and "arxiv.org" in explained
    swept = main(YAML, "--sweep", "actor.max_num_seqs=64,128,256", "--plot", str(tmp_path / "sweep.png"))
    assert len(swept.stdout.splitlines()) == 5 and (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    both = main(YAML, "max_staleness=0", "actor.replicas=5", "--sweep", "placement=split,colocated,auto", "--plot",
                str(tmp_path / "both.png"))
    cells = [line.split() for line in both.stdout.splitlines()]
    assert [row[0] for row in cells[1:4]] == ["split", "colocated", "auto"] and [row.count("-") for row in cells[1:4]] == [0, 1, 0]
    assert both.stderr.startswith("placement=auto, sync, 80 x h100")
    for wrong, message in ((("plan.hardware=h300",), "a100, h100, h200, b200"), (("--explain", "speed"), "generate_s")):
        refused = main(YAML, *wrong)
        assert refused.returncode == 2 and message in refused.stderr
    with pytest.raises(ConfigError, match="no calibration file"):
        load_hardware(YAML)
    light = subprocess.run([sys.executable, "-c", "import sys, plan; assert 'torch' not in sys.modules"],
                           cwd=Path(plan.__file__).parent)
    assert light.returncode == 0


@pytest.mark.long
def test_calibration_measures_this_machine(tmp_path):
    """Every curve is there, rises, and makes a prediction that is of this machine."""
    file = tmp_path / "here.json"
    done = main("configs/toy.yaml", "placement=colocated", "--calibrate", str(file))  # which asks for a publication all the same
    assert done.returncode == 0, done.stderr
    machine = load_hardware(str(file))
    for name in ("prefill", "decode", "forward", "backward", "broadcast"):
        sizes = [size for size, _ in machine.curves[name]]
        assert sizes == sorted(sizes) and all(seconds > 0 for _, seconds in machine.curves[name])
    found = json.loads(main("configs/toy.yaml", f"plan.hardware={file}", "--json").stdout)
    assert found["hardware"]["origin"].startswith("measured on configs/toy") and 1e-3 < found["step_s"]["sync"] < 60
