import pytest

from nexar.transport.quic import available


def test_the_native_package_is_there():
    reason = available()
    if reason:
        pytest.skip(f"nothing of this folder can be tested: {reason}")
