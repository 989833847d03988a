"""QUIC transport, based on the native package."""

from __future__ import annotations

from nexar.native import native_problem


def missing_support() -> str | None:
    """Return why this process cannot use QUIC, or None."""
    return native_problem()
