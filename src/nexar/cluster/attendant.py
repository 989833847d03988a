"""A launcher as the cluster knows it: authenticated, without a rank, there to reserve places and to report deaths."""

from __future__ import annotations

import dataclasses
import logging
from typing import Self

from nexar.cluster.join_line import LineLost
from nexar.cluster.node import Node
from nexar.cluster.worker import Worker
from nexar.config import Config
from nexar.errors import JoinRefused
from nexar.security.invitation import Invitation
from nexar.security.request import make_request
from nexar.types import NodeId, Rank
from nexar.wire.joining import ChildDied, Reserve

_log = logging.getLogger(__name__)


class Attendant:
    """A block of `count` ranks, reserved at the seed for the children of this process, as long as it is open.

    JoinRefused, SeedUnreachable, VersionMismatch when it is made. Close it, or leave its `with` block, when the
    children have ended.
    """

    def __init__(self, invitation: Invitation, count: int, config: Config, first_rank: Rank | None = None) -> None:
        # Nobody dials a launcher, so the port of the settings is left to the members.
        network = tuple(scheme for scheme in config.transports if scheme != "shm")
        self._node = Node(dataclasses.replace(config, port=0, port_range=None, transports=network))
        try:
            self._reserve(invitation, count, config, first_rank)
        except BaseException:
            self._node.close()
            raise

    def _reserve(self, invitation: Invitation, count: int, config: Config, first_rank: Rank | None) -> None:
        def ask(proof: bytes) -> Reserve:
            request = make_request(self._node.id, self._node.key)
            return Reserve(proof=proof, request=request, host=self._node.host, count=count, first_rank=first_rank)

        worker = Worker(self._node, invitation, timeout=config.formation_timeout)
        self._line, welcome = worker.enter("launcher", ask)
        if welcome.first_rank is None or welcome.group_rank is None:
            self._line.close("you reserved nothing")
            raise JoinRefused(reason="it reserved no ranks for this launcher", address=self._line.address)
        self.first_rank: Rank = welcome.first_rank
        self.group_rank: int = welcome.group_rank
        self.size: int = welcome.size
        """Of the whole world."""

    @property
    def node(self) -> NodeId:
        """What children name as their launcher."""
        return self._node.id

    def report(self, rank: Rank, cause: str) -> None:
        """A child has died: tell the seed. If that is gone too, the members find out by themselves."""
        try:
            self._line.send(ChildDied(rank=rank, cause=cause))
        except LineLost as lost:
            _log.info("cannot report that rank %d died: %s", rank, lost)

    def close(self) -> None:
        """Idempotent."""
        self._line.leave("its children have ended")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
