"""One rank of several processes that share a GPU."""

import numpy as np

from nexar.communicator.communicator import Communicator
from tests.devices.operations import OPERATIONS, Device


def every_operation(comm: Communicator) -> int:
    """How many went well."""
    import torch

    def make(values: object) -> object:
        return torch.tensor(np.asarray(values), device="cuda")

    device = Device(make, lambda tensor: tensor.cpu().numpy(), torch.Tensor, torch.Tensor)
    for operation in OPERATIONS:
        operation(comm, device)
    return len(OPERATIONS)
