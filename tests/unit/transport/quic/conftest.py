"""Without the native package there is nothing to test here, and the reason says so."""

import pytest

from nexar.transport.quic import available

collect_ignore_glob = ["test_*.py"] if available() else []


def pytest_report_header() -> str:
    """Say why nothing of this folder runs."""
    reason = available()
    return f"tests/unit/transport/quic skipped: {reason}" if reason else "tests/unit/transport/quic: nexar_quic found"


@pytest.fixture
def scene():
    """Makes nodes and carriers, and takes them down again."""
    from tests.unit.transport.quic.scene import Scene

    with Scene() as made:
        yield made
