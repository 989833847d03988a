"""Tests in real processes. A child that fails shows its traceback here; see nexar.testing.peer_process."""

import pytest

from nexar.testing.peer_protocol import RAW, ConnectionTerms


@pytest.fixture
def raw_terms() -> ConnectionTerms:
    """Bare TLS carriers: the quickest connection that works everywhere."""
    return ConnectionTerms(schemes=["tls"], assembly=RAW, timeout=20)
