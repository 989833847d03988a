"""The transports to measure: each one alone (raw) and through a Link, beside plain and TLS sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nexar_tools.peer_protocol import LINKED, RAW, ConnectionTerms
from nexar_tools.transports import why_unavailable

SOCKETS, NATIVE, CARRIER, LINK = "sockets", "native", "raw", "Link"
REFERENCE = "TLS"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the tables."""

    transport: str
    layer: str
    node_class: str
    talker: str
    scheme: str
    one_host: bool = False
    one_process: bool = False

    @property
    def name(self) -> str:
        return f"{self.transport} {self.layer}"

    def terms(self, timeout: float = 30.0) -> ConnectionTerms:
        """Settings for the processes."""
        return ConnectionTerms(schemes=self.scheme.split("+"), node_class=self.node_class, timeout=timeout)

    def missing(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if self.layer == SOCKETS:
            return None
        return next(filter(None, map(why_unavailable, self.scheme.split("+"))), None)


def _sockets(transport: str, scheme: str) -> Candidate:
    return Candidate(transport, SOCKETS, "socket_line:SocketNode", "socket_line:SocketTalker", scheme)


def _raw(scheme: str, **place: Any) -> Candidate:
    return Candidate(scheme, CARRIER, RAW, "carrier_line:CarrierTalker", scheme, **place)


def _link(scheme: str, **place: Any) -> Candidate:
    return Candidate(scheme, LINK, LINKED, "link_line:LinkTalker", scheme, **place)


def _sidecar(scheme: str, node_class: str) -> Candidate:
    return Candidate(scheme, LINK, f"link_line:{node_class}", "link_line:LinkTalker", scheme)


ALL = (
    _sockets("TCP", "plain"),
    _sockets(REFERENCE, "tls"),
    Candidate("quic", NATIVE, "native_line:NativeNode", "native_line:NativeTalker", "quic"),
    _raw("quic"),
    _link("quic"),
    _sidecar("quic+tcp", "PlainSidecarNode"),
    _sidecar("quic+tls", "EncryptedSidecarNode"),
    _raw("tls"),
    _link("tls"),
    _raw("tcp"),
    _link("tcp"),
    _raw("shm", one_host=True),
    _link("shm", one_host=True),
    _link("memory", one_host=True, one_process=True),
)
