"""Tests in real processes. A child that fails shows its traceback here; see nexar_tools.peer_process."""

import pytest

from nexar_tools.peer_protocol import RAW, ConnectionTerms


@pytest.fixture
def raw_terms() -> ConnectionTerms:
    """Bare TLS carriers: the quickest connection that works everywhere."""
    return ConnectionTerms(schemes=["tls"], node_class=RAW, timeout=20)
