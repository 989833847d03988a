"""The door of torch 2.14 and later: a backend that torch's own process group calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

from nexar.communicator.communicator import Communicator
from nexar.errors import UsageError
from nexar.torch.calls import Calls
from nexar.torch.parts import part_of, without

NAME = "nexar"


class NexarBackend(Calls, Backend):
    """One group of ranks. What torch asks a backend about itself is answered here: the base class would ask back."""

    def __init__(self, communicator: Communicator, timeout: float, *, owned: bool) -> None:
        Backend.__init__(self, communicator.rank, communicator.size)
        self._options = Backend.Options(NAME, timedelta(seconds=timeout))
        self.begin(communicator, timeout, owned=owned)

    # -- facts -------------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """Groups are made of groups without asking anybody."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Calls are not collected: each begins when it is made, and all are in flight together."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """Ranks can be left out, also lost ones."""
        return True

    @property
    def supports_reconfigure(self) -> bool:
        """Use nexar.torch.adopt() instead."""
        return False

    @property
    def supports_window(self) -> bool:
        """There is no one-sided access to memory of others."""
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    @property
    def options(self) -> Any:
        """As torch keeps them."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        """As users write it."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number()

    # -- other groups ------------------------------------------------------------------------------------

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Links are open already."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> NexarBackend:
        """The group of these ranks of this one; they all call it."""
        part = part_of(self.communicator, ranks)
        if part is None:
            raise UsageError(f"rank {self.communicator.rank} asked for a group of {list(ranks)}, which it is not in")
        return NexarBackend(part, self._timeout, owned=True)

    def shrink(self, ranks: Sequence[int], flags: int = 0, opts: Any = None) -> NexarBackend:
        """The group without these ranks, lost ones too; the others call it."""
        return NexarBackend(without(self.communicator, ranks), self._timeout, owned=True)
