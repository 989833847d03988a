"""A transport of another package, as the node that drives it sees it: what it raises there has a name.

An error of one of ours is a bug of nexar, and says so by itself. One of a package that was installed beside us would
end the driving thread somewhere in the middle, and nobody who waits would learn why. So what such a transport raises
while it is driven is logged once, with its traceback, and raised as `TransportBroke`; the node ends all waiting with
it. The whole node, not the links of that transport only: nobody can tell what it has lost, and a link is one with all
its carriers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from nexar.errors import UsageError
from nexar.security.credentials import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, Expected, Transport

_log = logging.getLogger(__name__)


class TransportBroke(UsageError):
    """A transport of another package raised while it was driven; its cause is what it raised."""


class Foreign(Transport):
    """Everything goes through to the transport inside; its carriers are its own."""

    def __init__(self, inside: Transport, blame: Callable[[BaseException], str]) -> None:
        """`blame`: what to say of an error, with the name of the package."""
        self.scheme = inside.scheme
        self.inside = inside
        self._blame = blame
        self._told = False  # written by who drives, or closes

    @property
    def address(self) -> str | None:  # type: ignore[override]  # the one inside says where it listens
        """See Transport."""
        return self.inside.address

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """See Transport."""
        self.inside.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        """See Transport."""
        self.inside.expect_peers(count)

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """See Transport."""
        return self.inside.listen(address, acceptor)

    def address_for(self, node: int) -> str | None:
        """See Transport."""
        return self.inside.address_for(node)

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """See Transport."""
        return self.inside.connect(address, expected, deadline)

    # -- what is driven --------------------------------------------------------------------------------

    def poll(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.poll()
        except Exception as error:  # noqa: BLE001 - whatever the code of a package raises
            self._break(error)

    @property
    def spins(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.spins
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def arm(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.arm()
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def due(self) -> float | None:
        """See Transport. TransportBroke."""
        try:
            return self.inside.due()
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def close(self) -> None:
        """See Transport. What it raises is logged and no more: nobody waits for it now, and the rest must close."""
        try:
            self.inside.close()
        except Exception as error:  # noqa: BLE001
            self._tell(error)

    def abandon(self) -> None:
        """See Transport."""
        self.inside.abandon()

    def _break(self, error: Exception) -> NoReturn:
        self._tell(error)
        raise TransportBroke(self._blame(error)) from error

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.error("%s", self._blame(error), exc_info=error)
