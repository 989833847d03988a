"""DDP communication hooks: gradient compression, and replacements for torch's C++ hooks."""

# No `from __future__ import annotations`: DDP inspects the annotations of a hook.
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from nexar.arrays.compression.base import Compressor
from nexar.torch.calls import GroupCalls, calls_of


class CompressedGradients:
    """State of `compress` for one model, used by the thread that computes its gradients."""

    def __init__(
        self, compressor: Compressor, group: dist.ProcessGroup | None = None, *, feedback: bool = True
    ) -> None:
        """`group`: the model's. `feedback=False` drops the unsent rest, for unbiased compressors."""
        self.compressor = compressor
        self._group = group
        self._feedback = feedback
        self._left: dict[int, torch.Tensor] = {}  # by bucket index

    def residual(self, bucket: dist.GradBucket) -> torch.Tensor | None:
        """The unsent rest, zeros at first and again when DDP rebuilds buckets after the first step."""
        if not self._feedback:
            return None
        gradients = bucket.buffer()
        left = self._left.get(bucket.index())
        if left is None or left.shape != gradients.shape:
            left = self._left[bucket.index()] = torch.zeros_like(gradients)
        return left

    def calls(self, gradients: torch.Tensor) -> GroupCalls:
        return calls_of(self._group, gradients.device)


def compress(state: CompressedGradients, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: `model.register_comm_hook(CompressedGradients(nexar.TopK(0.01)), compress)`.

    Averages all ranks' compressed gradients.
    """
    gradients = bucket.buffer()
    return state.calls(gradients).average_compressed(gradients, state.compressor, state.residual(bucket)).get_future()


def _is_served(model: DistributedDataParallel, backend: str) -> bool:
    """torch's list is right even if DETAIL mode wraps the backend. Unlisted groups are inspected."""
    group, device = model.process_group, model.device_type
    if group in distributed_c10d._world.pg_backend_config:
        return f"{device}:{backend}" in dist.get_backend_config(group).split(",")
    return isinstance(group, GroupCalls) or isinstance(group._get_backend(torch.device(device)), GroupCalls)


_MARK: Final = "_amended_by_nexar"
_IN_PYTHON: Final = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


def patch_ddp(backend: str) -> None:
    """Makes `_register_builtin_comm_hook` use torch's Python hooks for models that `backend` serves: C++ hooks need a
    C++ tensor list, which a Python future cannot hold. Once per process.
    """
    if hasattr(DistributedDataParallel, _MARK):
        return
    in_cpp = DistributedDataParallel._register_builtin_comm_hook

    def register(model: DistributedDataParallel, kind: Any) -> None:
        if _is_served(model, backend):
            model.register_comm_hook(model.process_group, _IN_PYTHON[kind])
        else:
            in_cpp(model, kind)

    DistributedDataParallel._register_builtin_comm_hook = register
    setattr(DistributedDataParallel, _MARK, True)
