"""Creates transports by scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Sleeper, Transport, Waker
from nexar.transport.memory import MemoryNetwork
from nexar.transport.registry import load, why_unavailable
from nexar.transport.sleeper import PollSleeper

if TYPE_CHECKING:
    from nexar.transport.quic.transport import QuicSettings


__all__ = ["any_port", "listen_address", "make_transport", "make_transports", "why_unavailable"]


def make_transports(
    schemes: Sequence[str],
    credentials: Credentials,
    trust: Trust,
    *,
    host: str = "127.0.0.1",
    network: MemoryNetwork | None = None,
    quic_settings: QuicSettings | None = None,
) -> tuple[dict[str, Transport], Sleeper]:
    """Returns one transport per scheme, and the driver's sleeper: QUIC if present, because it drives while it sleeps.

    The caller closes a PollSleeper, after the transports.
    """
    made: dict[str, Transport] = {}
    if "quic" in schemes:
        made["quic"] = make_transport("quic", None, credentials, trust, host=host, quic_settings=quic_settings)
    sleeper = cast(Sleeper, made["quic"]) if made else PollSleeper()
    for scheme in schemes:
        if scheme != "quic":
            made[scheme] = make_transport(scheme, sleeper, credentials, trust, host=host, network=network)
    return made, sleeper


def make_transport(
    scheme: str,
    waker: Waker | None,
    credentials: Credentials,
    trust: Trust,
    *,
    host: str = "127.0.0.1",
    network: MemoryNetwork | None = None,
    quic_settings: QuicSettings | None = None,
) -> Transport:
    """Returns a transport that does not listen yet. Only QUIC needs no `waker`."""
    if scheme == "quic":
        return load("quic")(credentials, trust, bind=any_port(host), settings=quic_settings)
    if scheme == "shm":
        return load("shm")(waker, credentials.node)
    if scheme == "memory":
        return load("memory")(waker, credentials.node, network or MemoryNetwork())
    return load(scheme)(waker, credentials, trust)


def listen_address(scheme: str, host: str) -> str:
    """The address that means a free port of `host`; empty if the scheme has no ports."""
    return any_port(host) if scheme in ("quic", "tls", "tcp") else ""


def any_port(host: str) -> str:
    """Port 0 of a host name, an IPv4 or an IPv6 address."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"
