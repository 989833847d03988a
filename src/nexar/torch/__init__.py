"""The torch.distributed backend "nexar". `init_process_group("nexar")` works without importing this package.

- `adopt(communicator)` makes torch's default group use your communicator, for elastic training.
- `communicator_of(group)` returns a group's communicator.
- `CompressedGradients`, `compress`: a DDP hook for gradient compression.
"""

from nexar.torch.creation import adopt, communicator_of
from nexar.torch.ddp_hooks import CompressedGradients, compress

__all__ = ["CompressedGradients", "adopt", "communicator_of", "compress"]
