"""QUIC carriers, on the native package `nexar-quic`, which is imported in this folder and nowhere else."""

from __future__ import annotations


def available() -> str | None:
    """None when QUIC can be used in this process, else the reason why not."""
    try:
        import nexar_quic  # noqa: F401, PLC0415  # here, so that nexar imports and works without the package
    except ImportError as error:
        return f"the package nexar-quic cannot be imported: {error}"
    return None
