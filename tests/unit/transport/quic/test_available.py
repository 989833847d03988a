import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nexar.transport.quic import NATIVE_RELEASE, available, misfit


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


def test_the_native_package_of_this_repository_fits():
    manifest = Path(__file__).parents[4] / "quic" / "Cargo.toml"
    assert misfit(tomllib.loads(manifest.read_text())["package"]["version"]) is None


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0", "1.0.0"])
def test_a_native_package_of_another_release_is_named_with_the_remedy(version):
    reason = misfit(version)
    assert reason.startswith(f"nexar-quic {version} is installed, but this nexar needs {NATIVE_RELEASE}; upgrade it")
