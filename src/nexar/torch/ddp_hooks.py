"""Communication hooks for DDP: gradients that are compressed on their way, what was left out being sent later, and
replacements for the hooks that torch has in C++.
"""

# No annotations as texts here: DDP looks at those of a hook.
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
    """The state of `compress`: what compresses, and for each bucket of gradients what was not sent yet.

    Used by one model, from the thread that computes its gradients.
    """

    def __init__(
        self, compressor: Compressor, group: dist.ProcessGroup | None = None, *, feedback: bool = True
    ) -> None:
        """`group`: of the model; None: the default one. `feedback=False` forgets what was left out: for compressors
        that leave out nothing in the mean.
        """
        self.compressor = compressor
        self._group = group
        self._feedback = feedback
        self._left: dict[int, torch.Tensor] = {}  # by the bucket's number

    def residual(self, bucket: dist.GradBucket) -> torch.Tensor | None:
        """What is left of this bucket, zeros at first. DDP cuts the buckets anew after the first step: what was left
        then is given up, once.
        """
        if not self._feedback:
            return None
        gradients = bucket.buffer()
        left = self._left.get(bucket.index())
        if left is None or left.shape != gradients.shape:
            left = self._left[bucket.index()] = torch.zeros_like(gradients)
        return left

    def calls(self, gradients: torch.Tensor) -> GroupCalls:
        """Of the group."""
        return calls_of(self._group, gradients.device)


def compress(state: CompressedGradients, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: `model.register_comm_hook(CompressedGradients(nexar.TopK(0.01)), compress)`.

    The average of what all ranks' compressed gradients mean, the same on all of them.
    """
    gradients = bucket.buffer()
    return state.calls(gradients).average_compressed(gradients, state.compressor, state.residual(bucket)).get_future()


def _is_served(model: DistributedDataParallel, backend: str) -> bool:
    """Whether `backend` reduces the model's gradients. Of the groups that torch has made it keeps a list, right also
    where its detailed debug mode wraps our backend. Any other group is asked itself.
    """
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
    """Let `model._register_builtin_comm_hook` register torch's hook in Python where `backend` reduces the gradients.
    Done once for the process.

    The hook in C++ asserts that a future holds a list of tensors of C++. A future that is made in Python, as those of a
    backend in Python are, holds a Python object and can hold nothing else. Both hooks compute the same.
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
