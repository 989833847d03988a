"""A transport of a package that is not nexar's: TLS under another name, at a port of its own."""

from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, Expected, Waker
from nexar.transport.tls import TlsTransport

SCHEME = "paper"


class PaperTransport(TlsTransport):
    def __init__(self, waker: Waker, credentials: Credentials | None, trust: Trust) -> None:
        super().__init__(waker, credentials, trust)
        self.scheme = SCHEME

    def listen(self, address: str, acceptor: Acceptor) -> str:
        return super().listen(address, Signing(acceptor))

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        return signed(super().connect(address, expected, deadline))


class Signing:
    """Gives carriers their scheme before anybody sees them."""

    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor

    def carrier_accepted(self, carrier: Carrier) -> None:
        self._acceptor.carrier_accepted(signed(carrier))

    def candidate_refused(self, address: str, reason: str) -> None:
        self._acceptor.candidate_refused(address, reason)


def signed(carrier: Carrier) -> Carrier:
    carrier.scheme = SCHEME
    return carrier
