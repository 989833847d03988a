"""What several stories at the seed's door begin with."""

from collections.abc import Iterator

import pytest

from nexar.testing.transports import why_unavailable
from tests.cluster.joiners import Knocker, knocking

SCHEMES = [
    pytest.param("tls"),
    pytest.param(
        "quic", marks=pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
    ),
]


@pytest.fixture(params=SCHEMES)
def knocker(request: pytest.FixtureRequest) -> Iterator[Knocker]:
    """Somebody who knocks over TLS, and over QUIC."""
    with knocking(request.param) as made:
        yield made
