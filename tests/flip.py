"""train.py with one bit of a live actor weight flipped after the third publication, before its proof."""

import os
import sys

import torch

import train
from sync import Publisher

inner, received = Publisher._transfer_in, []


def flipped(self, tensors):
    seconds = inner(self, tensors)
    received.append(seconds)
    if len(received) == 3:
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    return seconds


if __name__ == "__main__":
    Publisher._transfer_in = flipped
    status = train.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
