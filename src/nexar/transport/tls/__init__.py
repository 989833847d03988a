"""TLS over TCP with two connections per peer; also plain TCP after TLS authentication."""

from nexar.transport.tls.transport import TlsTransport

__all__ = ["TlsTransport"]
