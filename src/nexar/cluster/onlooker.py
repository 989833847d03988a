"""Somebody who looks at a cluster from outside: it has the secret, and neither a rank nor a say."""

from __future__ import annotations

import dataclasses
import time
from typing import Final, Self

from nexar.cluster.join_line import LineLost, RefusedBySeed
from nexar.cluster.knock import nobody_listens
from nexar.cluster.node import Node
from nexar.cluster.notice_board import gather
from nexar.cluster.worker import Worker
from nexar.config import Config
from nexar.errors import JoinRefused, SeedUnreachable
from nexar.security.invitation import Invitation
from nexar.wire.bulletin import Board
from nexar.wire.joining import Look, Shown

_SOON: Final = 1.0


class Onlooker:
    """A line to the seed on which its board is shown. One thread at a time. Close it, or leave its `with` block.

    JoinRefused, SeedUnreachable, VersionMismatch when it is made, within `timeout` seconds; `hurry`: at once where
    nobody listens, since the seed was there before its ticket was.
    """

    def __init__(self, invitation: Invitation, config: Config, *, timeout: float = 5.0, hurry: bool = False) -> None:
        self._invitation = invitation
        if hurry and nobody_listens(invitation.addresses, _SOON):
            timeout = min(timeout, _SOON)  # for QUIC, which nobody refuses: a seed may do without TCP
        self._timeout: Final = timeout
        # Nobody dials an onlooker, so the port of the settings is left to the members.
        network = tuple(scheme for scheme in config.transports if scheme != "shm")
        self._node = Node(dataclasses.replace(config, port=0, port_range=None, transports=network))
        try:
            self._line, _ = Worker(self._node, invitation, timeout=timeout).watch()
        except BaseException:
            self._node.close()
            raise

    def look(self) -> Board:
        """What the board shows now. SeedUnreachable when the seed is gone, or does not answer in time."""
        return gather(self._page)

    def _page(self, first: int) -> Board:
        try:
            self._line.send(Look(first))
            answer = self._line.expect(Shown, time.monotonic() + self._timeout)
        except RefusedBySeed as refused:
            raise JoinRefused(reason=refused.reason, address=self._line.address) from refused
        except (LineLost, TimeoutError) as lost:
            raise self._gone(lost) from lost
        return answer.board

    def _gone(self, cause: Exception) -> SeedUnreachable:
        return SeedUnreachable(
            addresses=self._invitation.addresses,
            attempts=1,
            cause=str(cause),
            remedy="the cluster has ended, or its members go on without the seed: start one again from its --state-dir",
        )

    def close(self) -> None:
        """Idempotent."""
        self._line.leave("it has seen enough")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
