"""Bytes by kind: what a rank keeps between steps, what a forward leaves for the backward, and the process's peak.

A 70B on 40 learners keeps 7.1 GB of parameters, 7.1 of gradients and 14.1 of moments a rank (fp32). Full activation checkpointing
adds 2 x 8192 x 80 bytes = 1.3 MB a token in bf16; without it, some twenty times that.
"""

import os
import resource

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode


class Living(TorchDispatchMode):
    """Knows every tensor that is made inside its `with`; `bytes()` is what of them is still alive.

    Around a forward, that is its activations, on any device. What FSDP gathered and freed again counts as freed.
    """

    def __init__(self):
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        before = {tensor.untyped_storage()._cdata for tensor in arguments if type(tensor) in (Tensor, Parameter)}  # of views
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if type(tensor) is Tensor and tensor.untyped_storage()._cdata not in before:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made.setdefault(reference.cdata, reference)
        return result

    def bytes(self) -> int:
        """Bytes alive now."""
        alive = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def nbytes(tensors) -> int:
    """Bytes of this rank's parts of plain or sharded tensors."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def machine_bytes(device: torch.device) -> int:
    """Memory of the GPU, or of the host."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total


def peak_bytes(device: torch.device) -> int:
    """Most memory ever held: of the GPU by tensors, or of the process (resident, so with libraries and mapped files)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
