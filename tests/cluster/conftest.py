"""What several stories at a seed begin with."""

from collections.abc import Iterator

import pytest

from nexar_tools.transports import why_unavailable
from tests.cluster.joiners import JoinDialer, join_dialer

SCHEMES = [
    pytest.param("tls"),
    pytest.param(
        "quic", marks=pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
    ),
]


@pytest.fixture(params=SCHEMES)
def dialer(request: pytest.FixtureRequest) -> Iterator[JoinDialer]:
    """A dialer that joins over TLS, and over QUIC."""
    with join_dialer(request.param) as made:
        yield made
