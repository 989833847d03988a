"""Removes the build machine's paths from wheels, and checks that none is left.

Maturin writes the crate's directory into its SBOM. `make wheels` calls this with the built wheels and makes the
compiler remap paths in compiled code.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SBOM = re.compile(r"[^/]+\.dist-info/sboms/[^/]+\.json")
_REFERENCE = re.compile(r'path\+file://[^"#]*#')
_DOWNLOAD = re.compile(r'\?download_url=file://[^"#]*')


def main(wheels: Sequence[str]) -> int:
    """Rewrites each wheel, then prints every remaining machine path; 0 if there is none."""
    faults = []
    for wheel in map(Path, wheels):
        strip_paths(wheel)
        faults += [f"{wheel.name}: {name} contains {path}" for name, path in machine_paths(wheel, places())]
    for fault in faults:
        print(f"wheels: {fault}")
    return 1 if faults else 0


def places() -> list[Path]:
    """Directories of this machine that a build may name."""
    cargo = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    found = {ROOT, Path.home(), cargo.resolve(), Path(sys.prefix), Path(sys.base_prefix)}
    return sorted(place for place in found if len(place.parts) > 1 and place != Path("/usr"))


def machine_paths(wheel: Path, among: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(file, directory or file URL that it contains) for each match in the wheel."""
    wanted = [*(f"{place}/".encode() for place in among), b"file://"]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            sbom = _SBOM.fullmatch(name) is not None
            yield from ((name, each.decode()) for each in wanted if each in data and (sbom or each != b"file://"))


def strip_paths(wheel: Path) -> None:
    """Rewrites the wheel's SBOMs without file URLs, and RECORD to match."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    changed = {info.filename: stripped(data) for info, data in files if _SBOM.fullmatch(info.filename)}
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in files:
            content = _record(data, changed) if info.filename.endswith(".dist-info/RECORD") else data
            archive.writestr(info, changed.get(info.filename, content))
    new.replace(wheel)


def stripped(sbom: bytes) -> bytes:
    """A CycloneDX document that names local packages only by name and version."""
    text = _REFERENCE.sub("", sbom.decode())
    return _DOWNLOAD.sub("", text).encode()


def _record(data: bytes, changed: dict[str, bytes]) -> bytes:
    rows = [_row(row, changed) for row in csv.reader(io.StringIO(data.decode()))]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _row(row: list[str], changed: dict[str, bytes]) -> list[str]:
    """Path, hash and size of a file in the wheel format."""
    content = changed.get(row[0])
    if content is None:
        return row
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return [row[0], f"sha256={digest}", str(len(content))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
