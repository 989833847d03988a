"""From torch's wish for a process group to one that stands on a communicator.

The default group joins a cluster, which rank 0 opens: the ticket travels through torch's store. Every other group is a
part of the default one, made without another word; where the default group is not of nexar, it joins a cluster of its
own in the same way.
"""

from __future__ import annotations

import atexit
import sys
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from nexar.communicator.communicator import Communicator
from nexar.launch.rendezvous import meet
from nexar.torch.calls import calls_of
from nexar.torch.ground import GROUND, Footing
from nexar.torch.parts import part_of

_KEY: Final = "nexar"


def create(options: Any, _backend_options: object) -> Any:
    """What torch registers for the name "nexar". `options` is torch's _DistributedBackendOptions."""
    timeout = options.timeout.total_seconds()
    communicator, footing = _stand(options, timeout)
    if torch.__version__ < (2, 14):
        from nexar.torch.group_door import NexarProcessGroup  # noqa: PLC0415  # one of the two fits

        return NexarProcessGroup(communicator, timeout, footing)
    from nexar.torch.backend_door import opened  # noqa: PLC0415

    return opened(communicator, timeout, footing, options)


def adopt(communicator: Communicator, timeout: float | None = None) -> None:
    """Make torch's default group stand on a communicator, which stays yours: instead of `init_process_group`.

    All its ranks call it. Ending the group, `dist.destroy_process_group()`, leaves the communicator open; so after a
    `MembershipChanged` the next group can stand on the next communicator, with its rank and its size. Groups of it are
    of nexar too: those of other backends would need a store that all ranks share. `timeout`: seconds for calls of
    torch's; None: as the communicator's settings say.
    """
    seconds = communicator.config.collective_timeout if timeout is None else timeout
    GROUND.offered = communicator
    try:
        dist.init_process_group(
            "nexar",
            store=dist.HashStore(),  # of this process alone: nothing has to be brought together any more
            rank=communicator.rank,
            world_size=communicator.size,
            timeout=timedelta(seconds=seconds),
        )
    finally:
        GROUND.offered = None


def communicator_of(group: dist.ProcessGroup | None = None, device: str = "cpu") -> Communicator:
    """What a process group of torch's, None for the default one, stands on: its verbs, its numbers, its members.
    UsageError if that is not of nexar. It belongs to the group, which closes it.
    """
    return calls_of(group, torch.device(device)).communicator


def _stand(options: Any, timeout: float) -> tuple[Communicator, Footing]:
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        GROUND.world, GROUND.footing = _world(options, timeout)
        return GROUND.world, GROUND.footing
    if GROUND.world is not None and GROUND.footing is not None and dist.is_initialized():
        part = part_of(GROUND.world, ranks, timeout)
        if part is not None:
            return part, GROUND.footing
    return _joined(options, timeout)


def _world(options: Any, timeout: float) -> tuple[Communicator, Footing]:
    offered, GROUND.offered = GROUND.offered, None
    return _joined(options, timeout) if offered is None else (offered, Footing(offered, _nothing))


def _joined(options: Any, timeout: float) -> tuple[Communicator, Footing]:
    communicator = meet(
        _Store(options.store),
        options.group_rank,
        options.group_size,
        collective_timeout=timeout,
        barrier_timeout=timeout,
        formation_timeout=timeout,
    )
    atexit.register(_leave, communicator)
    return communicator, Footing(communicator, communicator.close)


def _nothing() -> None:
    """It is somebody else's."""


def _leave(communicator: Communicator) -> None:
    """For who did not destroy the process group: the others are told, and also why if it was an error."""
    error = getattr(sys, "last_value", None)
    communicator.__exit__(type(error) if error is not None else None, error, getattr(error, "__traceback__", None))


class _Store:
    """torch's store as a board."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, text: str) -> None:
        self._store.set(_KEY, text)

    def read(self) -> str:
        posted: bytes = self._store.get(_KEY)
        return posted.decode()
