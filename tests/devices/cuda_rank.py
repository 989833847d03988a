"""One rank of several processes that share a GPU."""

import numpy as np

from nexar.communicator.communicator import Communicator
from tests.devices.verbs import VERBS, Device


def every_verb(comm: Communicator) -> int:
    """How many went well."""
    import torch

    def make(values: object) -> object:
        return torch.tensor(np.asarray(values), device="cuda")

    device = Device(make, lambda tensor: tensor.cpu().numpy(), torch.Tensor, torch.Tensor)
    for verb in VERBS:
        verb(comm, device)
    return len(VERBS)
