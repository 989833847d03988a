"""From torch's wish for a process group to one that stands on a communicator.

The default group joins a cluster, which rank 0 opens: the ranks meet through torch's store (`launch.rendezvous`).
Every other group is a part of the default one, made without another word; where the default group is not of nexar, it
joins a cluster of its own in the same way.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from nexar.communicator.communicator import Communicator
from nexar.errors import FormationTimeout, SeedUnreachable, UsageError
from nexar.launch.rendezvous import join_through_store
from nexar.torch.calls import NODES, SharedNode, calls_of, subgroup_of
from nexar.torch.ddp_hooks import patch_ddp

NAME: Final = "nexar"
OLDEST: Final = (2, 13)
"""The torch that `nexar[torch]` asks for; who has installed nexar without that may have any."""


def create(options: Any, _backend_options: object) -> Any:
    """What torch registers for the name "nexar". `options` is torch's _DistributedBackendOptions.

    UsageError for a torch that is too old; else the errors of `nexar.init`, of which OperationTimeout and
    SeedUnreachable also tell of a rank 0 that has not come, or has ended.
    """
    if torch.__version__ < OLDEST:
        raise UsageError(
            f"the backend nexar needs torch {'.'.join(map(str, OLDEST))} or a newer one, and this is "
            f"{torch.__version__}; install it with pip install 'nexar[torch]'"
        )
    patch_ddp(NAME)
    timeout = options.timeout.total_seconds()
    communicator, shared_node = _make_group(options, timeout)
    if torch.__version__ < (2, 14):
        from nexar.torch.process_group import NexarProcessGroup  # noqa: PLC0415  # one of the two fits

        return NexarProcessGroup(communicator, timeout, shared_node)
    from nexar.torch.backend import opened  # noqa: PLC0415

    return opened(communicator, timeout, shared_node, options)


def adopt(communicator: Communicator, timeout: float | None = None) -> None:
    """Make torch's default group stand on a communicator, which stays yours: instead of `init_process_group`.

    All its ranks call it. Ending the group, `dist.destroy_process_group()`, leaves the communicator open; so after a
    `MembershipChanged` the next group can stand on the next communicator, with its rank and its size. Groups of it are
    of nexar too: those of other backends would need a store that all ranks share. `timeout`: seconds for calls of
    torch's; None: as the communicator's settings say.
    """
    seconds = communicator.config.collective_timeout if timeout is None else timeout
    NODES.offered = communicator
    try:
        dist.init_process_group(
            "nexar",
            store=dist.HashStore(),  # of this process alone: nothing has to be brought together any more
            rank=communicator.rank,
            world_size=communicator.size,
            timeout=timedelta(seconds=seconds),
        )
    finally:
        NODES.offered = None


def communicator_of(group: dist.ProcessGroup | None = None, device: str = "cpu") -> Communicator:
    """What a process group of torch's, None for the default one, stands on: its verbs, its numbers, its members.
    UsageError if that is not of nexar. It belongs to the group, which closes it.
    """
    return calls_of(group, torch.device(device)).communicator


def _make_group(options: Any, timeout: float) -> tuple[Communicator, SharedNode]:
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        NODES.world, NODES.shared_node = _world(options, timeout)
        return NODES.world, NODES.shared_node
    if NODES.world is not None and NODES.shared_node is not None and dist.is_initialized():
        part = subgroup_of(NODES.world, ranks, timeout)
        if part is not None:
            return part, NODES.shared_node
    return _joined(options, timeout)


def _world(options: Any, timeout: float) -> tuple[Communicator, SharedNode]:
    offered, NODES.offered = NODES.offered, None
    return _joined(options, timeout) if offered is None else (offered, SharedNode(offered, _nothing))


def _joined(options: Any, timeout: float) -> tuple[Communicator, SharedNode]:
    try:
        communicator = join_through_store(
            _Store(options.store),
            options.group_rank,
            options.group_size,
            timeout,
            collective_timeout=timeout,
            barrier_timeout=timeout,
            formation_timeout=timeout,
        )
    except FormationTimeout as error:
        error.add_note("here this is the timeout= of init_process_group or new_group, whatever the setting says")
        raise
    at_exit = atexit.register(partial(_leave, communicator))

    def leave() -> None:
        atexit.unregister(at_exit)  # it would keep the node of every cluster that has ended
        communicator.close()

    return communicator, SharedNode(communicator, leave)


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

    def put(self, key: str, text: str) -> None:
        with _gone_with_rank_0():
            self._store.set(key, text)

    def find(self, key: str) -> str | None:
        with _gone_with_rank_0():
            if not self._store.check([key]):
                return None
            found: bytes = self._store.get(key)
        return found.decode(errors="replace")


@contextmanager
def _gone_with_rank_0() -> Iterator[None]:
    """SeedUnreachable for a store that does not answer: it runs in the process of rank 0, or of its launcher."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError, DistStoreError: every store has its own
        raise SeedUnreachable(
            addresses=[],
            attempts=1,
            cause=f"torch's store, through which rank 0 tells the address, is gone: {str(error).partition(chr(10))[0]}",
            remedy="look at what rank 0 has said before it ended",
        ) from error
