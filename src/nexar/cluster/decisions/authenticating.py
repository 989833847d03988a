"""From a stranger to somebody who has proven that it knows the secret. Pure."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from nexar.cluster.addresses import add_seen, check_told
from nexar.cluster.decisions.admission_events import Applied, Reserved, Watched
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Member
from nexar.errors import InternalError, UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.types import UNKNOWN_NODE
from nexar.wire.handshake import Hello
from nexar.wire.joining import Apply

WRONG_SECRET: Final = "the ticket or token does not open this cluster"
MAX_ONLOOKERS: Final = 64
"""At once: each costs the seed a line."""

Joining: TypeAlias = Literal["candidate", "launcher", "onlooker"]


class Onlookers:
    """Those that look at the board."""

    def __init__(self) -> None:
        self._connections: set[int] = set()

    def enter(self, guest: Guest) -> None:
        """One more. Refusal if there are enough."""
        if len(self._connections) >= MAX_ONLOOKERS:
            raise Refusal(f"{MAX_ONLOOKERS} others watch already; try again when one of them has ended")
        self._connections.add(guest.connection)

    def leave(self, guest: Guest) -> None:
        """Its connection has ended. Of anybody else it is no news."""
        self._connections.discard(guest.connection)


def greet(guest: Guest, hello: Hello) -> None:
    """It says hello. Refusal for who has done so, is nobody, or can never come in."""
    if guest.hello is not None:
        raise Refusal("it said hello twice")
    if hello.role not in ("candidate", "launcher", "onlooker"):
        raise Refusal(f"a {hello.role} cannot join; a candidate or a launcher can")
    if hello.node == UNKNOWN_NODE:
        raise Refusal("its hello names no node")
    guest.hello = hello


def describe_member(guest: Guest, hello: Hello, asked: Apply) -> Member:
    """The place that a candidate asks for. Refusal if it told an address that nobody can dial."""
    try:
        check_told(asked.addresses)
    except UsageError as error:
        raise Refusal(f"nobody can dial it (check its NEXAR_ADVERTISE): {error}") from None
    addresses = add_seen(asked.addresses, guest.address)
    return Member(hello.node, asked.host, guest.fingerprint, addresses, hello.capabilities, asked.launcher)


def authenticate(guest: Guest, role: Joining, event: Applied | Reserved | Watched) -> Hello:
    """Its hello, now that it is no stranger any more. Refusal if this is not an honest `role`."""
    if guest.hello is None:
        raise Refusal("it asked to be let in before it said hello")
    if guest.fingerprint or guest.watches:
        raise Refusal("it asked to be let in twice")
    if guest.hello.role != role:
        raise Refusal(f"its hello says {guest.hello.role}, and it asked for what is for another role: {role}")
    if not event.proof_ok:
        raise Refusal(WRONG_SECRET)
    if isinstance(event, Watched):
        guest.watches = True
        return guest.hello
    if len(event.fingerprint) != FINGERPRINT_BYTES:
        raise InternalError(f"an application with a fingerprint of {len(event.fingerprint)} bytes was let through")
    guest.fingerprint = event.fingerprint
    return guest.hello
