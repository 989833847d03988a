"""From torch's wish for a process group to one that stands on a communicator.

The default group joins a cluster, which rank 0 opens: the ticket travels through torch's store. Every other group is a
part of the default one, made without another word; where the default group is not of nexar, it joins a cluster of its
own in the same way.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from nexar.communicator.communicator import Communicator
from nexar.launch.rendezvous import meet
from nexar.torch.calls import Calls
from nexar.torch.parts import part_of

_KEY: Final = "nexar"


class _Ground:
    """What groups of this process stand on. Written by the thread that makes or destroys process groups."""

    def __init__(self) -> None:
        self.offered: Communicator | None = None
        """For the next default group, by adopt()."""
        self.world: Communicator | None = None
        """Of the default group."""


ground: Final = _Ground()


def create(options: Any, _backend_options: object) -> Any:
    """What torch registers for the name "nexar". `options` is torch's _DistributedBackendOptions."""
    timeout = options.timeout.total_seconds()
    communicator, owned = _communicator(options, timeout)
    return _door()(communicator, timeout, owned=owned)


def _communicator(options: Any, timeout: float) -> tuple[Communicator, bool]:
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        ground.world, owned = _world(options, timeout)
        return ground.world, owned
    if ground.world is not None and _is_default_of_nexar():
        part = part_of(ground.world, ranks, timeout)
        if part is not None:
            return part, True
    return _joined(options, timeout), True


def _is_default_of_nexar() -> bool:
    return dist.is_initialized() and "nexar" in dist.get_backend_config()


def _world(options: Any, timeout: float) -> tuple[Communicator, bool]:
    offered, ground.offered = ground.offered, None
    return (_joined(options, timeout), True) if offered is None else (offered, False)


def _joined(options: Any, timeout: float) -> Communicator:
    communicator = meet(
        _Store(options.store),
        options.group_rank,
        options.group_size,
        collective_timeout=timeout,
        barrier_timeout=timeout,
        formation_timeout=timeout,
    )
    atexit.register(_leave, communicator)
    return communicator


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


def _door() -> Callable[..., Calls]:
    if torch.__version__ < (2, 14):
        from nexar.torch.group_door import NexarProcessGroup  # noqa: PLC0415  # one of the two fits

        return NexarProcessGroup
    from nexar.torch.amendments import amend  # noqa: PLC0415
    from nexar.torch.backend_door import NexarBackend  # noqa: PLC0415

    amend()
    return NexarBackend
