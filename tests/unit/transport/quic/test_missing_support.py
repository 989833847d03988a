import pytest

from nexar.transport.quic import missing_support


def test_the_native_package_is_there():
    reason = missing_support()
    if reason:
        pytest.skip(f"nothing of this folder can be tested: {reason}")
