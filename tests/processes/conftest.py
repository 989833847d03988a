"""Tests in real processes. A child that fails shows its traceback here; see nexar.testing.peer_process."""

import pytest

from nexar.testing.peer_process import RAW, Terms


@pytest.fixture
def raw_terms() -> Terms:
    """Bare TLS carriers: the quickest connection that works everywhere."""
    return Terms(schemes=["tls"], assembly=RAW, timeout=20)
