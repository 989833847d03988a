import subprocess
import sys

import pytest

from nexar.transport.quic import available


def test_the_native_package_is_there():
    reason = available()
    if reason:
        pytest.skip(f"nothing of this folder can be tested: {reason}")


def test_nexar_imports_and_says_why_quic_is_not_there():
    code = "import sys; sys.modules['nexar_quic'] = None; import nexar; from nexar.transport.quic import available; "
    said = subprocess.run(
        [sys.executable, "-c", code + "print(available())"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("the package nexar-quic cannot be imported")
