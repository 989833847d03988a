"""Creates torch process groups on communicators.

The default group joins a cluster that rank 0 opens and publishes in torch's store (`launch.rendezvous`). Other groups
are its subgroups, or join their own cluster if the default group does not use nexar.
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
"""Required by `nexar[torch]`; other installations may have any torch."""


def create(options: Any, _backend_options: object) -> Any:
    """torch calls it with its _DistributedBackendOptions. Raises UsageError for an old torch, or errors of
    `nexar.init`. OperationTimeout and SeedUnreachable may mean that rank 0 is missing or ended.
    """
    if torch.__version__ < OLDEST:
        raise UsageError(
            f"the backend nexar needs torch {'.'.join(map(str, OLDEST))} or newer, but this is "
            f"{torch.__version__}; install it with pip install 'nexar[torch]'"
        )
    patch_ddp(NAME)
    timeout = options.timeout.total_seconds()
    communicator, shared_node = _make_group(options, timeout)
    if torch.__version__ < (2, 14):
        from nexar.torch.process_group import NexarProcessGroup  # noqa: PLC0415  # the other module needs a newer torch

        return NexarProcessGroup(communicator, timeout, shared_node)
    from nexar.torch.backend import opened  # noqa: PLC0415

    return opened(communicator, timeout, shared_node, options)


def adopt(communicator: Communicator, timeout: float | None = None) -> None:
    """Make torch's default group use this communicator. All its ranks call it instead of `init_process_group`.

    `dist.destroy_process_group()` leaves the communicator open: after a `MembershipChanged`, adopt the next one.
    Subgroups must use nexar: other backends need a shared store. `timeout`: for torch's calls; default: the
    communicator's.
    """
    seconds = communicator.config.collective_timeout if timeout is None else timeout
    NODES.adopted = communicator
    try:
        dist.init_process_group(
            "nexar",
            store=dist.HashStore(),  # of this process alone: the ranks are already connected
            rank=communicator.rank,
            world_size=communicator.size,
            timeout=timedelta(seconds=seconds),
        )
    finally:
        NODES.adopted = None


def communicator_of(group: dist.ProcessGroup | None = None, device: str = "cpu") -> Communicator:
    """Return the communicator that a group owns (None: the default group). UsageError if nexar does not serve it."""
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
    adopted, NODES.adopted = NODES.adopted, None
    return _joined(options, timeout) if adopted is None else (adopted, SharedNode(adopted, _nothing))


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
        error.add_note("the timeout= of init_process_group or new_group applies, not the setting")
        raise
    at_exit = atexit.register(partial(_leave, communicator))

    def leave() -> None:
        atexit.unregister(at_exit)  # else it would keep the node of every ended cluster alive
        communicator.close()

    return communicator, SharedNode(communicator, leave)


def _nothing() -> None:
    """The user owns the communicator."""


def _leave(communicator: Communicator) -> None:
    """Runs at exit unless the group was destroyed."""
    error = getattr(sys, "last_value", None)
    communicator.__exit__(type(error) if error is not None else None, error, getattr(error, "__traceback__", None))


class _Store:
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
    """Raises SeedUnreachable if the store does not answer: rank 0 or its launcher runs it."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError or DistStoreError, depending on the store
        first_line = next(iter(str(error).splitlines()), "")
        raise SeedUnreachable(
            addresses=[],
            attempts=1,
            cause=f"torch's store, in which rank 0 publishes the address, is gone: {first_line}",
            remedy="look at the output of rank 0 before it ended",
        ) from error
