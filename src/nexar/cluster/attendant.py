"""A launcher as the cluster knows it: authenticated, without a rank, there to reserve places and to report deaths."""

from __future__ import annotations

import dataclasses
import logging
import platform
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from nexar.cluster.join_line import JoinLine
from nexar.cluster.node import Node
from nexar.cluster.standing import Listeners, Standing
from nexar.cluster.wait_notice import Tell
from nexar.cluster.worker import Worker
from nexar.config import Config
from nexar.security.invitation import Invitation
from nexar.security.request import make_request
from nexar.transport.foreign_text import one_line
from nexar.types import NodeId, Rank
from nexar.wire.joining import ChildDied, Reserve, RunFailed

_MAX_HOST: Final = 255
_log = logging.getLogger(__name__)


class Attendant:
    """A block of `count` ranks, reserved at the seed for the children of this process, as long as it is open. Where the
    cluster has formed and is elastic the children get no ranks here: they join.

    JoinRefused, SeedUnreachable, VersionMismatch when it is made. Close it, or leave its `with` block, when the
    children have ended. A seed that goes away is knocked at again, and hears then what could not be reported.
    """

    def __init__(
        self,
        invitation: Invitation,
        count: int,
        config: Config,
        first_rank: Rank | None = None,
        *,
        tell: Tell | None = None,
        on_run_failed: Callable[[RunFailed], None] | None = None,
    ) -> None:
        """`tell` shows the user what it waits for while no seed answers. `on_run_failed` is told by a thread which
        failure, on any host, stops the run. It must not block.
        """
        self._tell = tell
        self._invitation, self._count, self._config = invitation, count, config
        self._lock = threading.Lock()
        self._on_run_failed = on_run_failed or _ignore
        self._reports: deque[ChildDied | RunFailed] = deque()  # that the seed has not heard; under the lock
        self._formed = threading.Event()  # set by the thread of the standing
        self._standing: Standing | None = None  # written once, here
        self.first_rank = first_rank
        """Of the block; None: the children are to join without ranks."""
        # Nobody dials a launcher, so the port of the settings is left to the members.
        network = tuple(scheme for scheme in config.transports if scheme != "shm")
        self._node = Node(dataclasses.replace(config, port=0, port_range=None, transports=network))
        try:
            self._reserve()
        except BaseException:
            self._node.close()
            raise

    def _reserve(self) -> None:
        worker = Worker(self._node, self._invitation, timeout=self._config.formation_timeout, tell=self._tell)
        line, welcome = worker.enter("launcher", self._ask)
        self.first_rank = welcome.first_rank
        self.group_rank: int | None = welcome.group_rank
        """The place of this launcher among the launchers; None where the children get no ranks."""
        self.elastic: bool = welcome.elastic
        """Whether the cluster goes on without ranks that fail."""
        self.size: int = welcome.size
        """Of the whole world."""
        listeners = Listeners(
            on_committed=self._formed.set,
            on_run_failed=self._on_run_failed,
            on_back=lambda _: self._send_reports(),
            on_refused=self._refused,
        )
        self._standing = Standing(self._node, line, welcome, self._knock)
        self._standing.start(listeners)

    def _ask(self, proof: bytes) -> Reserve:
        request = make_request(self._node.id, self._node.key)
        host, first_rank = self._node.host, self.first_rank  # the same block, from a seed that began anew
        epoch = 1 if self.formed else 0  # a seed of another cluster must not take us for one of its own
        return Reserve(proof=proof, request=request, host=host, count=self._count, first_rank=first_rank, epoch=epoch)

    def _knock(self) -> JoinLine:
        worker = Worker(self._node, self._invitation, timeout=self._config.join_auth_timeout)
        return worker.enter_again("launcher", self._ask)

    def _refused(self, reason: str, _: int) -> None:
        """The children know better why, if they are concerned."""
        _log.info("the seed refused this launcher: %s", reason)

    @property
    def node(self) -> NodeId:
        """What children name as their launcher."""
        return self._node.id

    @property
    def formed(self) -> bool:
        """Whether everybody was there, once."""
        return self._formed.is_set()

    def report(self, rank: Rank, cause: str, *, well: bool = False) -> None:
        """A child has ended, `well` if as it should: tell the seed. If that is gone, then when it is back; meanwhile
        the members find out by themselves.
        """
        self._report(ChildDied(rank=rank, cause=cause, well=well))

    def report_failure(self, rank: Rank, cause: str, code: int, *, consequence: bool) -> None:
        """A child has failed, and the run is to stop on all hosts, with this exit code. As `report`."""
        host = one_line(platform.node())[:_MAX_HOST]
        self._report(RunFailed(rank=rank, cause=cause, code=code, consequence=consequence, host=host))

    def _report(self, message: ChildDied | RunFailed) -> None:
        with self._lock:
            self._reports.append(message)
        self._send_reports()

    def _send_reports(self) -> None:
        with self._lock:
            while self._reports and self._standing is not None and self._standing.send(self._reports[0]):
                self._reports.popleft()

    def close(self) -> None:
        """Idempotent."""
        if self._standing is not None:
            self._standing.close("its children have ended")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ignore(_: RunFailed) -> None:
    """Nobody wants to know."""
