"""The process group for torch up to 2.13. It replaces torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup

from nexar.communicator.communicator import Communicator
from nexar.torch.calls import AnyWork, GroupCalls, SharedNode

GROUP_NAME = "nexar"


class NexarProcessGroup(GroupCalls, ProcessGroup):
    """One group of ranks."""

    def __init__(self, communicator: Communicator, timeout: float, shared_node: SharedNode) -> None:
        ProcessGroup.__init__(self, communicator.rank, communicator.size)
        self.begin(communicator, timeout, shared_node)
        self._name = ""  # torch sets both, once
        self._description = ""

    def allreduce(self, tensors: Any, opts: Any = None) -> AnyWork:
        """DDP hooks pass one tensor or several, with options, an operation or neither."""
        given = opts if isinstance(opts, AllreduceOptions) else AllreduceOptions()
        if opts is not None and given is not opts:
            given.reduceOp = opts
        return super().allreduce([tensors] if isinstance(tensors, torch.Tensor) else tensors, given)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return GROUP_NAME

    def getRank(self) -> int:  # noqa: N802
        return self.communicator.rank

    def getSize(self) -> int:  # noqa: N802
        return self.communicator.size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number()

    def _set_default_timeout(self, timeout: Any) -> None:
        self.set_timeout(timeout)
