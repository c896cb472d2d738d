"""train.py with one bit of a live actor weight flipped after the third publication, before its proof."""

import os
import sys

import torch

import train
from sync import Publisher

inner = Publisher._report_live


def flipped(self, version, tensors, seconds):
    if version == 2:
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    inner(self, version, tensors, seconds)


if __name__ == "__main__":
    Publisher._report_live = flipped
    status = train.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
