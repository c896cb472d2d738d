"""What tests/test_kernels_sampling.py and tests/test_kernels_logprob.py compile: the launches that a 70B makes."""

from kernels.logprob import tile
from kernels.sampling import launch

VOCAB = 128256
COLUMNS = {"stride": "i32:16", "V": "i32:16"}


def sampling(logits: str, arch: str) -> list:
    """The three kernels as sample_triton launches them; `logits` is "bf16" or "fp32"."""
    row = {"logits_ptr": f"*{logits}", **COLUMNS, "temperature_ptr": "*fp32", "maxima_ptr": "*fp32"}
    sizes = launch(VOCAB)
    cuts = {"top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "kept_ptr": "*fp32", "lowest_ptr": "*i32"}
    out = {"sums_ptr": "*fp32", "kept_ptr": "*fp32", "lowest_ptr": "*i32", "uniforms_ptr": "*fp64", "tokens_ptr": "*i64",
           "logprobs_ptr": "*fp32"}
    return [
        ["kernels.sampling:_stats", arch, row | {"sums_ptr": "*fp32"}, {"BLOCK": sizes["BLOCK"]}, {"num_warps": 4}],
        ["kernels.sampling:_truncate", arch, row | cuts, sizes | {"PIVOTS": 8}, {"num_warps": 16}],
        *(["kernels.sampling:_draw", arch, row | out, sizes | {"TRUNCATES": truncates}, {"num_warps": 4}]
          for truncates in (False, True)),
    ]


def head(hidden: str, arch: str, hidden_size: int = 8192, one: bool = False) -> list:
    """Both kernels of logprob as its launchers call them; `hidden` is "bf16" or "fp32", `one`: a single row, one split."""
    itemsize = {"bf16": 2, "fp32": 4}[hidden]
    both = {"hidden_ptr": f"*{hidden}", "weight_ptr": f"*{hidden}", "V": "i32:16", "temperature": "fp32", "local_ptr": "*i64",
            "E": "i32:16" if hidden_size % 16 == 0 else "i32"}
    forward = {"parts_ptr": "*fp32", "target_ptr": "*fp32"}
    rows = dict.fromkeys(("lse_ptr", "entropy_ptr", "grad_logp_ptr", "grad_entropy_ptr"), "*fp32") | {"out_ptr": f"*{hidden}"}
    entries = []
    for kernel, types, counts, block in (("_partials", forward, ("R", "splits"), 256 if arch == "sm_90" else 128),
                                         ("_grad_logits", rows, ("R",), 128)):
        options = tile(1 if one else 32768, hidden_size, itemsize, block)
        constants = {name: options.pop(name) for name in list(options) if name.isupper()}
        if one:  # Triton makes an integer argument of 1 a constant
            constants |= dict.fromkeys(counts, 1)
        else:
            types = types | dict.fromkeys(counts, "i32")
        entries.append([f"kernels.logprob:{kernel}", arch, both | types, constants, options])
    return entries


ENTRIES = [*sampling("fp32", "sm_90"), *sampling("bf16", "sm_90"), *head("bf16", "sm_90")]
LONG_ENTRIES = [*sampling("fp32", "sm_80"), *sampling("bf16", "sm_80"), *head("bf16", "sm_80"), *head("bf16", "sm_90", one=True),
                *head("bf16", "sm_90", 580), *head("fp32", "sm_90"), *head("fp32", "sm_80")]
