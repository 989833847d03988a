"""QUIC transport, based on the native package."""

from __future__ import annotations

from nexar.native import native_problem


def available() -> str | None:
    """Return why this process cannot use QUIC, None if it can."""
    return native_problem()
