"""The arithmetic of a run before a GPU is rented, and beside what was measured afterwards. No torch (but for --calibrate).

    python plan.py configs/llama3.1-70b-64xh100.yaml [section.key=value ...]      # a page to follow with a pencil
    python plan.py CONFIG --json | --explain KEY | --sweep learner.shards=24,40,56 | --calibrate FILE
    python plan.py --fit                                              # the largest model on 1 and 8 GPUs of 24 to 141 GB

Two numbers rule a 70B. A token costs 2 x 69.5e9 = 139 GFLOP forward and thrice that in training, plus attention; and a decode
step reads 139 GB of weights whatever it decodes, so it pays to decode 295 samples at once on an H100 (FLOP/s by bytes/s), if
their keys and values, 328 kB a token, fit. All else on the page follows from these, the lengths, and the wires.

What is derived for hardware that was not measured is called that. sheet.py derives the page; here is what is asked of it: sweeps,
the largest model that fits, the placement of a run (`placement=auto`), and the comparison with which every run ends.
"""

import argparse
import dataclasses
import json
import statistics
import sys

import costs
from config import Config, ConfigError
from costs import Costs, Workload, actor_memory, fits, learner_memory
from hardware import SHEETS, Hardware, load_hardware
from ledger import ROLES
from settings import build, check, parse
from shape import Shape, read_shape, shape_from_hf
from sheet import SOURCES, Case, Entry, case_of, derive, show

# Before and after a run.

def machine_of(config: Config, device: str, bounds: dict[str, float]) -> Hardware:
    """What a run is on: as configured, or the sheet of the GPU called `device`, or only the bounds that its start measured."""
    known = config.plan.hardware or named_sheet(device)
    if known:
        return load_hardware(known)
    link = bounds["link"] * 1e9 or bounds["bandwidth"] / 4  # a rank alone casts, then copies: reads and writes twice
    return Hardware(device, bounds["flops"], bounds["flops"], bounds["flops"], bounds["bandwidth"], bounds["memory"], link, link,
                    {"process": bounds["process"]},
                    "by formula from the GEMM, copy and link measured at the start; `plan.py --calibrate` measures curves")


def named_sheet(device: str) -> str:
    """The sheet whose name is in a GPU's, such as `NVIDIA H100 80GB HBM3`; empty if none is."""
    return next((name for name in SHEETS if name in device.lower()), "")


def place(config: Config, gpus: int, device: str = "", local: int = 0) -> tuple[Config, str]:
    """`placement=auto`: the fastest placement that fits of `gpus` ranks, `local` on each machine, and why.

    Raises ConfigError if there is none, or if the config allows none.
    """
    if gpus == 1:
        alone = costs.placed(config, (1, 1, 1, 1), colocated=True)
        check(alone)
        return alone, "placement=auto: colocated, as one rank must be both"
    known = config.plan.hardware or named_sheet(device)
    if not known:
        raise ConfigError("`placement` = auto needs to know the machine: measure it by `python plan.py CONFIG --calibrate FILE` "
                          "and set plan.hardware=FILE, or name one of its sheets")
    if 0 < local < min(gpus, config.plan.gpus_per_node):  # several machines, smaller ones than the plan has
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, gpus_per_node=local))
    hardware, shape, mode = load_hardware(known), read_shape(config.model.path), costs.mode_of(config)
    found = {"split": costs.search(costs.placed(config, (1, 1, 1, gpus - 1)), shape, hardware, mode)}
    if mode == "sync" and config.publish.mode == "in_place":
        found["colocated"] = costs.search_colocated(costs.placed(config, (1, 1, 1, gpus), colocated=True), shape, hardware)
    fitting = {name: best for name, best in found.items() if best}
    if not fitting:
        raise ConfigError(f"`placement` = auto: no placement of {config.model.path} on {gpus} x {hardware.name} fits its memory; "
                          "`python plan.py --fit` shows what does")

    def said(name: str) -> str:
        seconds, (replicas, tp, copies, shards) = fitting[name]
        return f"{name}, {replicas} engines of TP {tp} and {copies} x {shards} learner shards, {show(seconds, 's')} a step"

    best, *others = sorted(fitting, key=lambda name: fitting[name][0])
    why = "; ".join([said(best), *(f"against {said(name)}" for name in others),
                     *(f"{name} does not fit" for name in found.keys() - fitting.keys())])
    chosen = costs.placed(config, fitting[best][1], best == "colocated")
    check(chosen)
    return chosen, f"placement=auto, {mode}, {gpus} x {hardware.name}, {hardware.origin}: {why}"


def seen(config: Config, rows: list[dict]) -> Workload:
    """The lengths that a run had: mean prompt, mean response, and the spread that cuts as many."""
    prompt, response, cut = (statistics.mean(row[key] for row in rows) for key in ("prompt_len", "response_len", "truncated"))
    work = dataclasses.replace(Workload.of(config), prompt=prompt, response=response)
    spreads = [dataclasses.replace(work, sigma=number / 10) for number in range(31)]
    return min(spreads, key=lambda each: abs(each.lengths().count(each.cap) / each.count - cut))


def compare(predicted: dict, rows: list[dict], mode: str) -> dict[str, tuple[float, float, str]]:
    """(predicted, measured, unit) by quantity; measured are medians of metrics.jsonl's `rows`."""

    def median(*keys: str) -> float | None:
        found = [sum(row.get(key, 0.0) for key in keys) for row in rows if any(key in row for key in keys)]
        return statistics.median(found) if found else None

    def spent(*kinds: str) -> float | None:
        return median(*(f"t_{role}_{kind}" for role in ROLES for kind in kinds))

    peaks = {"learner": "mem_peak_mb", "actor": "mem_actor_peak_mb", "colocated": "mem_peak_mb"}
    pairs = {"step": (predicted["step_s"][mode], median("step_s"), "s"),
             "decode and prefill": (predicted["generate_s"], spent("decode", "prefill"), "s"),
             "learner": (predicted["train_s"], spent("forward", "backward", "optimizer"), "s"),
             "publication": (predicted["publish_now_s"], median("publish_s"), "s")}
    for side, kinds in predicted["memory_bytes"].items():
        highest = max((row[peaks[side]] for row in rows if peaks[side] in row), default=None)
        pairs[f"peak memory, {side}"] = (kinds["total"], highest and highest * 1e6, "B")
    return {name: pair for name, pair in pairs.items() if pair[1]}


def comparison(found: dict[str, tuple[float, float, str]]) -> str:
    """The same as a table."""
    return "\n".join([f"{'':24}{'predicted':>12}{'measured':>12}{'error':>9}",
                      *(f"{name:24}{show(guess, unit):>12}{show(measured, unit):>12}{guess / measured - 1:>+9.1%}"
                        for name, (guess, measured, unit) in found.items())])


def afterwards(config: Config, rows: list[dict], hardware: Hardware) -> str:
    """What a run ends with: each prediction for the lengths it had, beside what its `rows` of metrics.jsonl measured.

    The first of several, which warms up, is left out; without any there is nothing to say.
    """
    warm = rows[1:] or rows
    if not warm:
        return "no step was run: nothing to hold against the predictions"
    case = dataclasses.replace(case_of(config), hardware=hardware, work=seen(config, warm))
    table = comparison(compare(derive(case).tree(), warm, costs.mode_of(config)))
    steps = f"medians of {len(warm)} steps" if len(warm) > 1 else "one step"
    return f"predicted for {hardware.name} ({hardware.origin}), and measured, {steps}:\n{table}"


# The command line.

def asked(argv: list[str]) -> Case:
    """What a command line asks; `placement=auto` is decided for as many GPUs as its actors and learners are together."""
    config = parse(argv)
    if config.placement == "auto":
        config, why = place(config, config.world_size, "h100")
        print(why, file=sys.stderr)
    return case_of(config)


def sweep(argv: list[str], key: str, values: list[str], out: str) -> str:
    """A table with one line a value, and a PNG of the same."""
    rows, names = [], ("generate_s", "train_s", "publish_now_s", "step_s.sync", "step_s.one_step", "tokens_per_s_per_gpu",
                       "dollars.step", "fits")
    for value in values:
        entries = derive(asked([*argv, f"{key}={value}"])).entries
        fitting = all(entry.value for name, entry in entries.items() if name.startswith("fits."))
        rows.append({name: entries.get(name) for name in names} | {"fits": Entry(fitting, "", "", "")})
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for name in ("generate_s", "train_s", "step_s.sync", "step_s.one_step"):
        axes.plot(values, [row[name].value if row[name] else float("nan") for row in rows], "o-", label=name)
    axes.set(xlabel=key, ylabel="seconds a step", ylim=(0, None))
    axes.legend()
    figure.savefig(out, dpi=110)
    lines = [f"{key:>24}" + "".join(f"{name:>22}" for name in names)]
    lines += [f"{value:>24}" + "".join(f"{show(entry.value, entry.unit) if entry else '-':>22}" for entry in row.values())
              for value, row in zip(values, rows, strict=True)]
    return "\n".join([*lines, f"plot: {out}"])


def family(hidden: int) -> Shape:
    """A Llama of any width in the proportions of the 70B: heads of 128, at most 8 KV heads, ffn 3.5 x, a layer for each 102."""
    heads = hidden // 128
    return shape_from_hf({"model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "vocab_size": 128256,
                          "num_hidden_layers": max(1, round(hidden / 102.4)), "num_attention_heads": heads,
                          "num_key_value_heads": 8 if heads % 8 == 0 else 4 if heads % 4 == 0 else 1})


def largest(memory: float, gpus: int, colocated: bool, learner: dict) -> float:
    """Parameters of the largest of the family that trains on sequences of 4k tokens with 16 samples at once; 0 if none does."""
    hardware = dataclasses.replace(load_hardware("h100"), memory=memory)
    best = 0
    for hidden in range(512, 16384, 256):
        shape = family(hidden)
        splits = [(gpus, gpus)] if colocated else [(tp, gpus - tp) for tp in (1, 2, 4) if tp < gpus]
        for tp, shards in splits:
            config = build({"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 1024},
                            "rollout": {"max_new_tokens": 3072}, "actor": {"tp": tp, "max_num_seqs": 16},
                            "learner": {"shards": shards, "activation_checkpointing": "full", **learner}})
            actor = actor_memory(config, shape, hardware, tp)
            actor["kv"] = 16 * config.max_model_len * Costs(shape, hardware, tp, 2).kv
            trainer = learner_memory(config, shape, hardware, 1, shards)
            if colocated:  # one context; the engine's working space and activations are never there together
                trainer |= {"weights": actor["weights"], "kv": actor["kv"], "graphs": actor["graphs"]}
            if fits(trainer, hardware) and (colocated or fits(actor, hardware)):
                best = max(best, shape.parameters)
    return best


def fit_table() -> str:
    moments = {"fp32": {}, "8bit": {"moments": "8bit"}, "offloaded": {"offload_moments": True}}
    lines = ["largest Llama-like model, 4k tokens, 16 samples at once, full checkpointing (derived, not measured)",
             f"{'':10}" + "".join(f"{f'{place}, {name}':>22}" for place in ("colocated", "split") for name in moments)]
    for gpus in (1, 8):
        for size in (24, 48, 80, 141):
            sizes = [largest(size * 1e9, gpus, colocated, settings) if colocated or gpus > 1 else 0
                     for colocated in (True, False) for settings in moments.values()]
            lines.append(f"{gpus} x {size:>3} GB" + "".join(f"{f'{N / 1e9:.1f} B' if N else '-':>22}" for N in sizes))
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """0, or 2 for a config or a key that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", help="a .yaml and section.key=value overrides")
    parser.add_argument("--json", action="store_true", help="all quantities, SI units")
    parser.add_argument("--explain", metavar="KEY", help="formula and source of the quantities that begin with KEY")
    parser.add_argument("--sweep", metavar="KEY=A,B,C", help="a table and a plot over values of one config key")
    parser.add_argument("--plot", default="plan.png", help="file for the sweep's plot")
    parser.add_argument("--fit", action="store_true", help="largest model by memory, GPUs, placement and moments")
    parser.add_argument("--calibrate", metavar="FILE", help="measure this machine on the config's model and write FILE")
    options = parser.parse_intermixed_args(argv)
    try:
        if options.fit:
            print(fit_table())
            return 0
        if options.sweep:
            key, _, values = options.sweep.partition("=")
            print(sweep(options.config, key, values.split(","), options.plot))
            return 0
        case = asked(options.config)
        if options.calibrate:
            from calibrate import calibrate  # torch, the engine and the learner: seconds to import
            print(calibrate(case.config, round(case.work.prompt), round(case.work.response), options.calibrate))
            return 0
        sheet = derive(case)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    if options.explain:
        found = {key: entry for key, entry in sheet.entries.items() if key.startswith(options.explain)}
        if not found:
            print(f"no quantity begins with {options.explain}; there are {', '.join(sheet.entries)}", file=sys.stderr)
            return 2
        for key, entry in found.items():
            print(f"{key} = {show(entry.value, entry.unit)} ({entry.value!r})\n    = {entry.how}\n    {SOURCES[entry.source]}")
    elif options.json:
        print(json.dumps(sheet.tree() | {"hardware": {"name": case.hardware.name, "origin": case.hardware.origin}}, indent=1))
    else:
        print(f"{case.config.model.path} on {case.config.world_size} x {case.hardware.name}: {case.hardware.origin}")
        print(sheet.page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
