"""QUIC carriers, on the native package `nexar-quic`, which is imported in this folder and nowhere else."""

from __future__ import annotations

from typing import Final

NATIVE_RELEASE: Final = "0.2"
"""Releases of nexar-quic with other first two numbers have another interface."""


def available() -> str | None:
    """None when QUIC can be used in this process, else the reason why not."""
    try:
        import nexar_quic  # noqa: PLC0415  # here, so that nexar imports and works without the package
    except ImportError as error:
        return f"the package nexar-quic cannot be imported: {error}"
    return misfit(nexar_quic.__version__)


def misfit(version: str) -> str | None:
    """Why this version of nexar-quic cannot be used; None when it can."""
    if version.rpartition(".")[0] == NATIVE_RELEASE:
        return None
    needed = f"this nexar needs {NATIVE_RELEASE}; upgrade it (in a clone: make setup)"
    return f"nexar-quic {version} is installed, but {needed}"
