"""What is installed is locked, of a known licence and source; and set-up says what it does to the system."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "setup"
LOCKS = sorted((SETUP / "requirements").glob("*.txt"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"setup_{name}", SETUP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_locked_package_has_a_version_and_hashes_and_no_file_names_an_index(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"^\s*-", text.replace("    --hash=", ""), re.MULTILINE)
    entries = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry), entry


def test_every_requirement_source_has_its_lock_file() -> None:
    sources = {path.stem for path in (SETUP / "requirements").glob("*.in")} - {"build"}  # build.in is part of dev
    assert {path.stem for path in LOCKS} == sources | {"dev", "docs"}


@pytest.mark.parametrize("script", ["torch_environment.sh", "bench_peers.sh"])
def test_the_torch_that_set_up_installs_by_itself_is_locked(script: str) -> None:
    found = re.search(r"(?:TORCH:-|^torch=)([0-9.]+)", (SETUP / script).read_text(), re.MULTILINE)
    assert found is not None
    assert f"torch=={found[1]} " in (SETUP / "requirements" / "torch_wheel.txt").read_text()


def test_the_packages_of_this_environment_are_allowed() -> None:
    pytest.importorskip("packaging")
    module = load("check_packages")
    policy = module.tomllib.loads((SETUP / "packages.toml").read_text())
    if not (ROOT / ".venv").exists():
        pytest.skip("not an environment that make setup made")
    assert [fault for fault in module._check_python(policy) if "licence" in fault or "banned" in fault] == []


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
        ("(MIT OR Apache-2.0) AND GPL-2.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("MIT/Apache-2.0", True),
        ("none", False),
        ("", False),
        ("MIT MIT", False),
        ("(MIT", False),
    ],
)
def test_a_licence_expression_is_understood(expression: str, *, allowed: bool) -> None:
    pytest.importorskip("packaging")
    known = frozenset({"MIT", "Apache-2.0", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"})
    assert load("check_packages").permits(expression, known) is allowed


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ('{"dependencies": []}', 0, "0 known vulnerabilities"),
        ("", 2, "INCOMPLETE"),
        (
            '{"dependencies": [{"name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]}',
            1,
            "CVE-1 (fixed in: 2)",
        ),
    ],
)
def test_an_audit_distinguishes_no_answer_from_a_good_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, status: int, words: str
) -> None:
    module = load("audit")

    def run(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=said, stderr="no route to host", returncode=1)

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "_audit_crates", lambda: 0)
    assert module.main() == status
    assert words in capsys.readouterr().out


def test_the_sbom_names_the_package_and_all_that_it_needs() -> None:
    pytest.importorskip("hatchling")
    core = SimpleNamespace(
        name="nexar", version="1", license_expression="Apache-2.0", dependencies=["numpy>=2", "Ml_Dtypes>=0.4"]
    )
    document = load("sbom").document(core)
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/nexar@1"
    assert [each["name"] for each in document["components"]] == ["numpy", "ml-dtypes"]


def test_set_up_leaves_the_system_alone_if_asked_to(tmp_path: Path) -> None:
    """With nothing on the PATH but what the script itself calls, everything is missing."""
    tools, touched = tmp_path / "bin", tmp_path / "touched"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "id"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (tools / "apt-get").write_text(f"#!/bin/sh\n: >{touched}\n")
    (tools / "apt-get").chmod(0o755)
    environ = {"PATH": str(tools), "VENV": str(tmp_path), "NO_SYSTEM_PACKAGES": "1"}
    ran = subprocess.run([tools / "bash", SETUP / "system.sh"], env=environ, capture_output=True, text=True, check=True)
    assert "chromium chromium-driver" in ran.stdout
    assert "NO_SYSTEM_PACKAGES is set" in ran.stdout
    assert not touched.exists()
    assert os.path.exists(tmp_path / ".nexar-system")


# ---------------------------------------------------------------- wheels

SBOM = """{
  "metadata": {"component": {
    "bom-ref": "path+file:///home/ann/nexar/native#nexar-native@0.2.0",
    "purl": "pkg:cargo/nexar-native@0.2.0?download_url=file://.#src/lib.rs"
  }},
  "dependencies": [{"ref": "path+file:///home/ann/nexar/native#nexar-native@0.2.0"}]
}"""


def wheel(folder: Path, **files: bytes) -> Path:
    """A wheel with a module `a.so`, an SBOM, and a RECORD of both."""
    path = folder / "a-1-py3-none-any.whl"
    content = {"a.so": b"code", "a-1.dist-info/sboms/a.json": SBOM.encode(), **files}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr("a-1.dist-info/RECORD", "".join(f"{name},sha256=x,1\n" for name in content))
    return path


def test_an_sbom_in_a_wheel_does_not_name_the_directory_of_the_build(tmp_path: Path) -> None:
    module, built = load("wheels"), wheel(tmp_path)
    places = [Path("/home/ann")]
    assert {name for name, _ in module.machine_paths(built, places)} == {"a-1.dist-info/sboms/a.json"}
    module.strip_paths(built)
    assert list(module.machine_paths(built, places)) == []
    with zipfile.ZipFile(built) as archive:
        sbom = archive.read("a-1.dist-info/sboms/a.json")
        record = archive.read("a-1.dist-info/RECORD").decode().splitlines()
        assert archive.read("a.so") == b"code"
    document = json.loads(sbom)
    component = document["metadata"]["component"]
    assert component["bom-ref"] == document["dependencies"][0]["ref"] == "nexar-native@0.2.0"
    assert component["purl"] == "pkg:cargo/nexar-native@0.2.0#src/lib.rs"
    digest = base64.urlsafe_b64encode(hashlib.sha256(sbom).digest()).rstrip(b"=").decode()
    assert record == ["a.so,sha256=x,1", f"a-1.dist-info/sboms/a.json,sha256={digest},{len(sbom)}"]


def test_a_machine_path_in_compiled_code_is_found(tmp_path: Path) -> None:
    module = load("wheels")
    built = wheel(tmp_path, **{"a.so": b"\0panicked at /home/ann/.cargo/registry/src/x.rs\0"})
    module.strip_paths(built)
    assert list(module.machine_paths(built, [Path("/home/ann")])) == [("a.so", "/home/ann/")]


def test_the_wheel_has_the_package_and_none_of_the_developers_tools(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"nexar", "nexar_torch_hook"}
    testing = {name.split("/")[2] for name in names if name.startswith("nexar/testing/")}
    assert testing == {"__init__.py", "faults.py", "virtual_clock.py", "simulator"}
    assert {"nexar/py.typed", "nexar/cli/bench/rank.py", "nexar/launch/seed_main.py"} <= set(names)
