"""Joins the cluster of an invitation, and leaves it at interpreter exit.

`sys.last_value` is the exception that ended the main thread, whatever `sys.excepthook` is. `init()` starts the leaving
thread, because since Python 3.12 no thread can be started during exit.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, TypeAlias

from nexar.cluster.wait_notice import tell_on_stderr
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.request import deliver_sends
from nexar.config import Config
from nexar.errors import NexarError, list_ranks
from nexar.links import process_hooks
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nexar.cluster.membership import Membership
    from nexar.communicator.communicator import Communicator
    from nexar.communicator.runtime import NodeRuntime


_log = logging.getLogger(__name__)

EXIT_TIMEOUT: Final = 5.0
"""Seconds for all nodes of the process to leave."""

LeaveFunction: TypeAlias = Callable[[BaseException | None], None]
"""Leaves the cluster because of this exception; None if the program seems to have ended well."""


class LeaveAtExit:
    """Leaves the cluster for one node at exit. Thread-safe."""

    def __init__(self, leave: LeaveFunction) -> None:
        self._leave = leave
        self._wake = threading.Event()
        self._cancelled = False  # written before `_wake` is set
        self._error: BaseException | None = None  # likewise
        self._thread = threading.Thread(target=self._run, name="nexar-exit", daemon=True)
        self._thread.start()
        _leavers[id(self)] = self

    def cancel(self) -> None:
        _leavers.pop(id(self), None)
        if not self._wake.is_set():
            self._cancelled = True
            self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_TIMEOUT)

    def begin(self, error: BaseException | None) -> None:
        self._error = error
        self._wake.set()

    def has_left(self, deadline: float) -> bool:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._wake.wait()
        if self._cancelled:
            return
        try:
            self._leave(self._error)
        except Exception as error:  # noqa: BLE001  # the process ends: no caller is left to catch it
            _log.warning("this rank could not leave the cluster at exit: %s", error)


_leavers: Final[dict[int, LeaveAtExit]] = {}
"""The open nodes of this process, by id. Each method of a dict is atomic."""


def _leave_all() -> None:
    """Runs before the nodes lose their threads."""
    leavers = list(_leavers.values())
    if not leavers:
        return
    threading.excepthook = _quiet(threading.excepthook)
    deadline, error = time.monotonic() + EXIT_TIMEOUT, _uncaught()
    for leaver in leavers:
        leaver.begin(error)
    try:
        late = [leaver for leaver in leavers if not leaver.has_left(deadline)]
    except KeyboardInterrupt:
        return  # the user does not want to wait
    if late:
        _log.warning("this rank exits; other ranks have not received all that it sent within %g s", EXIT_TIMEOUT)


def _uncaught() -> BaseException | None:
    """An interactive interpreter continues after an exception."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return None if interactive else getattr(sys, "last_value", None)


def _quiet(hook: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], object]:
    """A daemon thread's call ended by the exit is not a failure."""

    def report(arguments: threading.ExceptHookArgs) -> None:
        daemon = arguments.thread is not None and arguments.thread.daemon
        if daemon and isinstance(arguments.exc_value, NexarError):
            _log.debug("a call of a daemon thread ended with the process: %s", arguments.exc_value)
        else:
            hook(arguments)

    return report


process_hooks.before_exit(_leave_all)
os.register_at_fork(after_in_child=_leavers.clear)  # in a forked child the nodes belong to the parent

SEND_TIMEOUT: Final = EXIT_TIMEOUT - 1.0
"""Seconds at exit for started sends; the rest of EXIT_TIMEOUT is for leaving."""


def tells_for_host(local_rank: int | None) -> bool:
    """Whether this rank prints what its host waits for. Two ranks do, because one may be missing."""
    return local_rank is None or local_rank <= 1


def join_cluster(
    config: Config,
    invitation: Invitation,
    *,
    rank: Rank | None = None,
    launcher: NodeId = UNKNOWN_NODE,
    size: int | None = None,
    local_rank: int | None = None,
) -> Communicator:
    """As `bootstrap`. The metrics server opens first, so a taken port affects no other rank."""
    ends = ExitStack()
    adopt = _serve_metrics(config, local_rank or 0, ends)

    def watch(runtime: NodeRuntime, communicator: Communicator) -> Callable[[], None]:
        adopt(runtime)
        ends.callback(LeaveAtExit(lambda error: _leave(communicator, runtime, error)).cancel)
        return ends.close

    try:
        return bootstrap(
            config,
            invitation,
            rank=rank,
            launcher=launcher,
            size=size,
            beside=watch,
            tell=tell_on_stderr,
            tells_for_host=tells_for_host(local_rank),
        )
    except BaseException:
        ends.close()
        raise


def _serve_metrics(config: Config, local_rank: int, ends: ExitStack) -> Callable[[NodeRuntime], None]:
    if config.metrics_port is None:
        return lambda _: None
    from nexar.observe.metrics import NodeSource, open_metrics  # noqa: PLC0415  # loaded only if metrics are enabled

    metrics = open_metrics(config, config.metrics_port, local_rank)
    ends.callback(metrics.close)

    def adopt(runtime: NodeRuntime) -> None:
        metrics.collector.source = NodeSource(runtime)

    return adopt


def _leave(communicator: Communicator, runtime: NodeRuntime, error: BaseException | None) -> None:
    """A rank that raised leaves at once: the others wait for its notice."""
    if error is None:
        _deliver_sends(runtime)
    communicator.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))


def _deliver_sends(runtime: NodeRuntime) -> None:
    mesh, node = runtime.mesh, runtime.node
    undelivered = deliver_sends(mesh.links, node.progress, time.monotonic() + SEND_TIMEOUT)
    if undelivered:
        _log.warning("%s", _warning(runtime.membership_service.membership, node.id, undelivered))


def _warning(membership: Membership, me: NodeId, undelivered: Mapping[NodeId, int]) -> str:
    count = sum(undelivered.values())
    ranks = sorted(rank for node in undelivered if (rank := membership.rank_of(node)) is not None)
    return (
        f"rank {membership.rank_of(me)} exits: {count} {'message' if count == 1 else 'messages'} to "
        f"{list_ranks(ranks)} {'was' if count == 1 else 'were'} not delivered within {format_seconds(SEND_TIMEOUT)}; "
        "receive them, or wait for the requests before the program ends"
    )
