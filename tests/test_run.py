"""The whole pipeline: actors and learners as processes, publication and proof in the loop; by torchrun once of each kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, job, rows, torchrun

TOY = "configs/toy.yaml"
SHORT = ("steps=20", "eval.every=0", "exact=true", "log.trackers=[]")


def train(run_dir: Path, world: int, *overrides: str, by=job) -> list[dict]:
    done = by(world, TOY, f"run_dir={run_dir}", *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return rows(run_dir)


def without_clocks(metrics: list[dict]) -> list[dict]:
    """Everything that must repeat: all but seconds and rates."""
    return [{key: value for key, value in row.items()
             if not key.startswith(("t_", "mem_")) and not key.endswith(("_s", "_per_s", "_gb_s"))} for row in metrics]


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("exact")
    train(run_dir, 2, *SHORT, by=torchrun)
    return run_dir


def test_engine_and_learner_agree_bit_for_bit(exact_run):
    """Proof 1: a gap between sampler and trainer is off-policy training that nobody asked for."""
    metrics = rows(exact_run)
    assert [row["step"] for row in metrics] == list(range(20)) and [row["version"] for row in metrics] == list(range(1, 21))
    for row in metrics:
        assert row["logprob_gap_max"] == row["logprob_gap_mean"] == row["kl"] == row["clipped"] == 0.0
        assert row["staleness_max"] == row["unscored"] == 0
    assert len({row["loss"] for row in metrics}) == 20, "nothing was trained"


@pytest.mark.long
def test_a_repeat_gives_the_same_metrics(exact_run, tmp_path):
    """A seed that does not reach initial weights, data order, or sampling."""
    metrics = without_clocks(train(tmp_path / "run", 2, *SHORT))
    assert metrics == without_clocks(rows(exact_run))
    assert metrics[0]["reward"] != train(tmp_path / "other", 2, *SHORT, "seed=1", "steps=1")[0]["reward"]


@pytest.mark.long
def test_two_actors_and_evaluations_give_the_metrics_of_one_actor_without(exact_run, tmp_path):
    """Samples that depend on their batch mates, results taken in order of arrival, and evaluations that draw random numbers
    make every run another one."""
    metrics = train(tmp_path / "run", 3, "actor.replicas=2", *SHORT, "eval.every=6")
    assert without_clocks(metrics) == without_clocks(rows(exact_run))
    assert [row["version"] for row in rows(tmp_path / "run", "eval.jsonl")] == [0, 6, 12, 18, 20]


@pytest.mark.parametrize("released", [True, pytest.param(False, marks=pytest.mark.long)])
def test_colocated_in_one_process_is_the_split_run(exact_run, tmp_path, released):
    """One loop: generating and learning in turn on one rank, its engine's memory given back in between, gives the same bits."""
    metrics = train(tmp_path / "run", 1, "placement=colocated", *SHORT, f"actor.release_memory={released}")
    assert without_clocks(metrics) == without_clocks(rows(exact_run))
    for row in metrics:
        spent = sum(value for key, value in row.items() if key.startswith("t_colocated_") and "beside" not in key
                    and not key.endswith("wall"))
        assert spent == pytest.approx(row["t_colocated_wall"], abs=1e-6), "the ledger must account for every second once"
        assert not any(key.startswith(("t_learner", "t_actor")) for key in row)
    books = rows(tmp_path / "run", "ledger.jsonl")
    assert [(row["rank"], row["role"]) for row in books] == [(0, "colocated")] * 20
    assert sum(row["other"] for row in books) <= 0.05 * sum(row["wall"] for row in books), "seconds that no category explains"


def test_a_run_ends_with_predictions_beside_measurements(tmp_path):
    """Every run is held against plan.py, for the machine that its start measured; auto on one rank is colocated, and says why."""
    done = torchrun(1, TOY, f"run_dir={tmp_path / 'run'}", "placement=auto", "steps=3", "eval.every=0", "log.trackers=[]")
    assert done.returncode == 0 and "placement=auto: colocated, as one rank must be both" in done.stdout
    table = done.stdout[done.stdout.index("predicted for"):].splitlines()
    assert "by formula from the GEMM, copy and link measured at the start" in table[0]
    lines = {line[:24].strip(): line[24:].split() for line in table[2:]}
    assert lines.keys() == {"step", "decode and prefill", "learner", "publication", "peak memory, colocated"}
    metrics = rows(tmp_path / "run")
    assert lines["peak memory, colocated"][2:4] == [f"{metrics[-1]['mem_peak_mb']:.0f}", "MB"]
    assert metrics[0]["prompt_len"] > 1 and metrics[0]["mem_actor_peak_mb"] <= metrics[-1]["mem_peak_mb"]


@pytest.mark.long
@pytest.mark.parametrize("layout", [
    ("learner.shards=2", "actor.replicas=2"),
    ("learner.shards=2", "actor.tp=2", "exact=false", "actor.release_memory=true"),
    ("learner.replicas=2", "learner.shards=2", "actor.replicas=2", "actor.tp=2", "exact=false", "publish.max_roots=1",
     "publish.bucket_mb=0.05")])
def test_colocated_ranks_share_engines_and_learners(exact_run, layout, tmp_path):
    """Lanes that stop in different turns would hang; shards published from ranks that also receive must still be proved."""
    metrics = train(tmp_path / "run", 4 if "learner.replicas=2" in layout else 2, "placement=colocated", *SHORT, "steps=6",
                    "eval.every=3", "eval.keep_best=true", *layout)
    assert [row["reward"] for row in metrics] == [row["reward"] for row in rows(exact_run)][:6]
    assert max(row["logprob_gap_max"] for row in metrics) <= (1e-5 if "exact=false" in layout else 0.0)
    assert [row["version"] for row in rows(tmp_path / "run", "eval.jsonl")] == [0, 3, 6]
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


@pytest.mark.long
def test_same_seed_same_metrics_however_the_engine_is_squeezed(tmp_path):
    """Proof 1 under preemption, chunks of 4 tokens and prefix hits: same bits, and a repeat is a repeat."""
    small = (*SHORT, "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "steps=6")
    squeezed = ("actor.kv_blocks=8", "actor.block_size=4", "actor.max_num_seqs=4", "actor.max_num_batched_tokens=4")
    first = train(tmp_path / "small", 2, *small)
    second = train(tmp_path / "squeezed", 2, *small, *squeezed)
    assert without_clocks(first) == without_clocks(second)


@pytest.mark.long
def test_agreement_does_not_depend_on_shards_packing_or_chunks(tmp_path):
    """Proof 1 on two FSDP shards with small micro-batches and chunks of 7 logprobs: other sums, same logprobs."""
    metrics = train(tmp_path / "run", 3, *SHORT, "steps=6", "learner.shards=2", "learner.logprob_chunk=7",
                    "learner.max_tokens_per_micro_batch=100")
    assert {row["logprob_gap_max"] for row in metrics} == {0.0}


def test_async_on_four_ranks_keeps_its_bound(tmp_path):
    """2 actors + 2 FSDP shards, one-step-off: the bound is used, never exceeded, and the gap shows the staleness."""
    metrics = train(tmp_path / "run", 4, "actor.replicas=2", "learner.shards=2", "max_staleness=1", "steps=8", "eval.every=4",
                    "learner.max_tokens_per_micro_batch=600", "algorithm.kl_coef=0.01", "log.trackers=[tensorboard]")
    stale = [row["staleness_max"] for row in metrics]
    assert max(stale) == 1 and stale[0] == 0
    assert metrics[0]["logprob_gap_max"] < 1e-5 and metrics[0]["kl"] == 0.0 and metrics[-1]["kl"] > 0
    assert max(row["logprob_gap_max"] for row in metrics) > 1e-3
    assert [row["version"] for row in rows(tmp_path / "run", "eval.jsonl")] == [0, 4, 8]
    for row in rows(tmp_path / "run", "rollouts.jsonl"):
        assert row["versions"] == sorted(row["versions"]) and row["versions"][0] >= row["step"] - 1, "older than v - K"
    assert list((tmp_path / "run").rglob("events.out.tfevents*")), "no TensorBoard file"
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert {event["pid"] for event in trace} == {0, 1, 2, 3}
    ways = ways_of(trace)
    for step in range(8):
        released, *on_actor, trained = ways["group", 16 * step]
        assert released == (0, "wait_rollouts") and trained in ((0, "forward"), (1, "forward"))
        assert len(on_actor) == 2 and on_actor[0][0] == on_actor[1][0] in (2, 3), "admitted and decoded by one actor"
        assert {kind for _, kind in on_actor} <= {"exchange", "prefill", "decode"}
        for actor in (2, 3):
            assert ways[f"weights to rank {actor}", step + 1] == [(0, "optimizer"), (0, "publish"), (actor, "publish")]


def ways_of(trace: list[dict]) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """For each arrow, the rank and kind of the spans that its points lie in, in order of time; each must lie in one."""
    ways: dict = {}
    for point in sorted((event for event in trace if event["ph"] in "stf"), key=lambda event: event["ts"]):
        spans = [event for event in trace if event["ph"] == "X" and (event["pid"], event["tid"]) == (point["pid"], 0)
                 and event["ts"] <= point["ts"] <= event["ts"] + event["dur"]]
        innermost = min(spans, key=lambda span: span["dur"])
        ways.setdefault((point["name"], point["id"]), []).append((point["pid"], innermost["name"]))
    return ways


def test_what_a_run_leaves_behind(exact_run):
    """Files, keys and sums that scripts rely on: DESIGN §8."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    keys = {"step", "version", "reward", "kl", "entropy", "logprob_gap_max", "logprob_gap_mean", "response_len", "truncated",
            "staleness_max", "tokens_per_s", "step_s", "publish_s", "publish_gb_s", "publish_verify_s"}
    for row in rows(exact_run):
        assert keys <= row.keys()
        assert row["tokens_generated"] == row["tokens_trained"] > 0 == row["tokens_filtered"] == row["tokens_unscored"]
        assert row["tokens_generated"] == row["trained_tokens"] and row["tokens_truncated"] == row["truncated"] * 256 * 8
        for role in ("learner", "actor"):
            spent = sum(value for key, value in row.items() if key.startswith(f"t_{role}_") and "beside" not in key
                        and not key.endswith("wall"))
            assert spent == pytest.approx(row[f"t_{role}_wall"], abs=1e-6), "the ledger must account for every second once"
    for rank in (0, 1):
        books = [row for row in rows(exact_run, "ledger.jsonl") if row["rank"] == rank]
        assert len(books) == 20, "seconds by rank and step"
        assert sum(row["other"] for row in books) <= 0.05 * sum(row["wall"] for row in books), "seconds that no category explains"
    sample = rows(exact_run, "rollouts.jsonl")[0]
    assert {"prompt", "text", "reward", "reward_parts", "versions", "logprob_gap_max", "finish_reason"} <= sample.keys()
    reparsed = subprocess.run([sys.executable, "-c", "import settings,sys; print(settings.parse(sys.argv[1:]).steps)",
                               str(exact_run / "config.yaml")], cwd=ROOT, capture_output=True, text=True)
    assert reparsed.stdout.strip() == "20" and "# torch:" in (exact_run / "config.yaml").read_text()
    model = AutoModelForCausalLM.from_pretrained(exact_run / "model")
    assert model.num_parameters() == 102720 and len(AutoTokenizer.from_pretrained(exact_run / "model")) == 13


@pytest.mark.long
def test_a_second_run_moves_the_first_aside(exact_run, tmp_path):
    """Re-running must neither mix two runs' metrics nor delete the first."""
    run_dir = tmp_path / "run"
    for _ in range(2):
        train(run_dir, 2, "steps=0", "eval.every=0", "log.trackers=[]")
    assert (tmp_path / "run.1" / "config.yaml").is_file() and (run_dir / "config.yaml").is_file()


def test_a_flipped_bit_ends_the_run_on_both_sides_with_one_line(tmp_path):
    """Proof 2 in a real run: no step is trained on samples of weights that are not the learner's."""
    done = torchrun(2, TOY, f"run_dir={tmp_path / 'run'}", "steps=9", "eval.every=0", "log.trackers=[]", script="tests/flip.py")
    assert done.returncode != 0 and f'File "{ROOT / "train.py"}"' not in done.stderr
    for side in ("rank 0 (learner, publish)", "rank 1 (actor, publish)"):
        assert f"{side} stopped: publication of version 2 is not what was sent: model.norm.weight differs on rank 1" in done.stderr
    assert len(rows(tmp_path / "run")) == 1, "step 1's publication failed: its row must not be written"


@pytest.mark.parametrize(("overrides", "message"), [
    (["learner.learning_rat=1"], "did you mean `learner.lr`"),
    pytest.param(["actor.replicas=2"], "--nproc-per-node 3", marks=pytest.mark.long),
    pytest.param(["reward.functions=[nowhere.py:f]"], "nowhere.py", marks=pytest.mark.long),
    (["actor.kv_blocks=1", "actor.block_size=2"], "actor.kv_blocks"),
])
def test_bad_input_is_refused_before_any_process_group(tmp_path, overrides, message):
    """R6: exit 2 (torchrun reports 1) and one message that names the field and the fix, no traceback, no run folder."""
    done = torchrun(2, TOY, f"run_dir={tmp_path / 'run'}", *overrides, timeout_s=90)
    assert done.returncode != 0 and message in done.stderr and done.stderr.count("config error") == 1
    assert f'File "{ROOT / "train.py"}"' not in done.stderr
    assert not (tmp_path / "run").exists()


def test_help_documents_every_field():
    import config
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for key, _, _, sentence in config.fields():
        assert key in done.stdout and sentence in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "overrides"), [
    (2, ["seed=1"]), (2, ["seed=2"]), (2, ["max_staleness=1"]),
    (4, ["actor.replicas=2", "learner.shards=2"]), (4, ["actor.replicas=2", "learner.replicas=2"]),
    (4, ["actor.replicas=2", "learner.shards=2", "max_staleness=1"])])
def test_the_toy_is_learned(tmp_path, world, overrides):
    """The embedded default reaches .9 from random weights, for every seed, world and staleness."""
    metrics = train(tmp_path / "run", world, *overrides)
    assert sum(row["reward"] for row in metrics[-10:]) / 10 > 0.9
    assert rows(tmp_path / "run", "eval.jsonl")[-1]["reward"] > 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
def test_exact_on_two_shards_and_two_actors(tmp_path):
    """Proof 1 on 2 FSDP shards over a whole toy run."""
    metrics = train(tmp_path / "run", 4, "actor.replicas=2", "learner.shards=2", "exact=true", "eval.every=0")
    assert len(metrics) == 150 and max(row["logprob_gap_max"] for row in metrics) == 0.0
