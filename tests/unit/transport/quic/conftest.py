"""Without the native package most of this folder cannot even be imported; test_missing_support.py then says so."""

import pytest

from nexar.transport.quic import missing_support

_WITHOUT_NATIVE_PACKAGE = {"test_addresses.py", "test_missing_support.py", "test_preamble.py"}


def pytest_ignore_collect(collection_path):
    """Leave out what needs the package, where it is missing."""
    name = collection_path.name
    return True if missing_support() and name.startswith("test_") and name not in _WITHOUT_NATIVE_PACKAGE else None


@pytest.fixture
def scene():
    """Makes nodes and carriers, and takes them down again."""
    from tests.unit.transport.quic.scene import Scene

    with Scene() as made:
        yield made
