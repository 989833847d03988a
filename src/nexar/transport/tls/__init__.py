"""TLS over TCP: two connections per peer, stdlib only. Also plain TCP that was authenticated when it was made."""

from nexar.transport.tls.transport import TlsTransport

__all__ = ["TlsTransport"]
