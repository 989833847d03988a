"""Transports by scheme, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Sleeper, Transport, Waker
from nexar.transport.memory import MemoryNetwork
from nexar.transport.registry import load
from nexar.transport.sleeper import PollSleeper

if TYPE_CHECKING:
    from nexar.transport.quic.transport import QuicSettings


def why_unavailable(scheme: str) -> str | None:
    """Why this transport cannot be used; None if it can."""
    if scheme == "quic":
        from nexar.transport.quic import available  # noqa: PLC0415

        return available()
    if scheme == "shm":
        from nexar.transport.shm.ring import missing_support  # noqa: PLC0415

        return missing_support()
    return None


def make_transports(
    schemes: Sequence[str],
    credentials: Credentials,
    trust: Trust,
    *,
    host: str = "127.0.0.1",
    network: MemoryNetwork | None = None,
    quic_settings: QuicSettings | None = None,
) -> tuple[dict[str, Transport], Sleeper]:
    """One transport per scheme, and the driver's sleeper: QUIC if present, because it drives while it sleeps.

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
    """Not listening yet. Only QUIC needs no `waker`."""
    if scheme == "quic":
        return load("quic")(credentials, trust, bind=any_port(host), settings=quic_settings)
    if scheme == "shm":
        return load("shm")(waker, credentials.node)
    if scheme == "memory":
        return load("memory")(waker, credentials.node, network or MemoryNetwork())
    return load(scheme)(waker, credentials, trust)


def listen_address(scheme: str, host: str) -> str:
    """A free port of `host`, if the scheme has ports."""
    return any_port(host) if scheme in ("quic", "tls", "tcp") else ""


def any_port(host: str) -> str:
    """`host` may be a name or an address of either family."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"
