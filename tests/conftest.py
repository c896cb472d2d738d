"""One thread per process: two ranks with two threads each on two cores crawl."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test uses 2 threads, spinning on busy cores takes 50 times as long
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when triton is imported

import torch

torch.set_num_threads(1)
