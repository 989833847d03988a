"""The torch.distributed backend "nexar". `init_process_group("nexar")` needs nothing from here; this goes further:

- `adopt(communicator)`: torch's default group on a communicator of yours, for training that loses and gains ranks
- `communicator_of(group)`: the communicator a group stands on
- `CompressedGradients`, `compress`: a communication hook for DDP
"""

from nexar.torch.creation import adopt, communicator_of
from nexar.torch.ddp_hooks import CompressedGradients, compress

__all__ = ["CompressedGradients", "adopt", "communicator_of", "compress"]
