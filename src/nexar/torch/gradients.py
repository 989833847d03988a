"""A communication hook for DDP: gradients are compressed on their way, and what was left out is sent later."""

# No annotations as texts here: DDP looks at those of a hook.
import torch
import torch.distributed as dist
from torch.futures import Future

from nexar.arrays.compression.compressor import Compressor
from nexar.torch.calls import Calls, calls_of


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

    def calls(self, gradients: torch.Tensor) -> Calls:
        """Of the group."""
        return calls_of(self._group, gradients.device)


def compress(state: CompressedGradients, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: `model.register_comm_hook(CompressedGradients(nexar.TopK(0.01)), compress)`.

    The average of what all ranks' compressed gradients mean, the same on all of them.
    """
    gradients = bucket.buffer()
    return state.calls(gradients).average_compressed(gradients, state.compressor, state.residual(bucket)).get_future()
