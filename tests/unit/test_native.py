"""The native package is optional, imported late, and of a release that fits."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nexar import native


def answer(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_nexar_does_not_import_the_native_package():
    code = "import sys, nexar, nexar.native; nexar.native.native_installed(); print('nexar_native' in sys.modules)"
    assert answer(code) == "False"


def test_nexar_imports_without_the_package_and_says_why_it_is_missing():
    code = "import sys; sys.modules['nexar_native'] = None; import nexar; from nexar import native; "
    said = answer(code + "print(native.native_problem())")
    assert said.startswith("the package nexar-native cannot be imported")


def test_a_submodule_of_a_missing_package_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "nexar_native", None)
    assert not native.native_installed()
    with pytest.raises(ImportError):
        from nexar.native import quic  # noqa: F401


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        native.nothing  # noqa: B018


def test_an_installed_package_can_be_imported_and_has_its_submodules():
    if native.native_problem():
        pytest.skip(native.native_problem())
    assert native.native_installed()
    assert answer("import nexar_native.quic; from nexar.native import quic; print(quic is nexar_native.quic)") == "True"
    assert answer("from nexar_native import quic; print(quic.__name__, quic.Endpoint.__module__)").split() == [
        "nexar_native.quic",
        "nexar_native.quic",
    ]


def test_the_package_of_this_repository_fits():
    manifest = Path(__file__).parents[2] / "native" / "Cargo.toml"
    assert native.version_problem(tomllib.loads(manifest.read_text())["package"]["version"]) is None


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0", "1.0.0"])
def test_a_package_of_another_release_is_named_with_the_remedy(version):
    reason = native.version_problem(version)
    assert reason.startswith(f"nexar-native {version} is installed, but this nexar needs {native.RELEASE}; upgrade it")
