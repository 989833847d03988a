"""Build hook that adds a CycloneDX SBOM to the wheel, in .dist-info/sboms/.

The wheel bundles no other packages, so the document lists nexar and its requirements with accepted versions. It depends
on pyproject.toml alone, so builds are reproducible.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "nexar.cdx.json"


class Sbom(BuildHookInterface):
    """Adds the document to every wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Implements hatchling's hook. `version` is the kind of wheel; an editable one gets no document."""
        if self.target_name != "wheel" or version != "standard":
            return
        path = Path(self.directory) / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(self.metadata.core), indent=2, sort_keys=True) + "\n")
        build_data["sbom_files"].append(str(path.relative_to(self.root) if path.is_relative_to(self.root) else path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary file."""
        (Path(self.directory) / NAME).unlink(missing_ok=True)


def document(core: Any) -> dict[str, Any]:
    """The document for a package with this metadata."""
    needs = [_component(Requirement(text)) for text in core.dependencies]
    me = {
        "type": "library",
        "bom-ref": "nexar",
        "name": core.name,
        "version": core.version,
        "purl": f"pkg:pypi/{core.name}@{core.version}",
        "licenses": [{"license": {"id": core.license_expression}}],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": me},
        "components": needs,
        "dependencies": [{"ref": "nexar", "dependsOn": [each["bom-ref"] for each in needs]}],
    }


def _component(requirement: Requirement) -> dict[str, Any]:
    name = canonicalize_name(requirement.name)
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "purl": f"pkg:pypi/{name}",
        "scope": "required",
        "properties": [{"name": "nexar:accepted-versions", "value": str(requirement.specifier)}],
    }
