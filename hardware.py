"""What machines can do: vendors' sheets, and this machine measured.

A sheet bounds; what kernels reach of it is a handful of shares below, each below 1 and with its source. A calibrated machine
needs no shares: its costs are curves, (size, seconds) points between which plan.py goes in straight lines.

    python plan.py configs/toy.yaml --calibrate toy.json      # under a minute
    python plan.py configs/toy.yaml plan.hardware=toy.json    # predictions from it
"""

import dataclasses
import json
from pathlib import Path

from config import ConfigError

STREAM = 0.90  # of HBM bandwidth that reading weights reaches in a decode step (FACTS: .85 gross at TP 1-2, launches apart)
READ_KV = 0.85  # of it that paged attention reaches (FlashAttention-3 paged: .90-.93 at large KV)
MULTIPLY = 0.65  # of peak FLOP/s in a decode step's narrow products
PREFILL = 0.50  # of peak in a prefill chunk, its all-reduces included
LINK = 0.85  # of NVLink that a large all-reduce reaches (nccl-tests)
ALLREDUCE_S = 11e-6  # latency of one within a node
LAYER_S, STEP_S = 20e-6, 1.8e-3  # gaps between the kernels of a layer; scheduling and sampling of a step


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its wires. SI units: FLOP/s dense, bytes, bytes/s in one direction."""
    name: str
    flops: float
    gemm_flops: float  # what a large bf16 product reaches
    fp8_flops: float
    bandwidth: float
    memory: float
    nvlink: float
    nic: float  # of the device's own card
    curves: dict = dataclasses.field(default_factory=dict)  # measured costs of one model on this machine
    origin: str = "derived from the vendor's sheet, not measured"


# Dense figures, as cited by github.com/pytorch/torchtitan (torchtitan/tools/utils.py) and github.com/stas00/ml-engineering.
SHEETS = {sheet.name: sheet for sheet in (
    Hardware("a100", 312e12, 271e12, 312e12, 2.04e12, 80e9, 300e9, 25e9),
    Hardware("h100", 989e12, 794e12, 1979e12, 3.35e12, 80e9, 450e9, 50e9),
    Hardware("h200", 989e12, 790e12, 1979e12, 4.8e12, 141e9, 450e9, 50e9),
    Hardware("b200", 2250e12, 1745e12, 4500e12, 8.0e12, 180e9, 900e9, 50e9))}
ETHERNET = 12.5e9  # bytes/s of a node that has one 100 Gb card and no other wire


def load_hardware(name: str) -> Hardware:
    """A sheet by name (h100 for none), or a calibration file. Raises ConfigError."""
    if name.lower() in SHEETS or not name:
        return SHEETS[name.lower() or "h100"]
    file = Path(name)
    if not file.is_file():
        raise ConfigError(f"`plan.hardware` = {name!r}: neither one of {', '.join(SHEETS)} nor a file of `plan.py --calibrate`")
    try:
        return Hardware(**json.loads(file.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"`plan.hardware` = {name!r} is no calibration file: {error}") from None


def along(curve: list, size: float) -> float:
    """Seconds at `size` on a curve of (size, seconds): straight lines between its points, the outer ones continued."""
    if len(curve) == 1:
        return curve[0][1] * size / curve[0][0]
    right = next((index for index in range(1, len(curve)) if curve[index][0] >= size), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))
