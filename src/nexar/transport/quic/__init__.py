"""QUIC carriers, on the native package."""

from __future__ import annotations

from nexar.native import native_problem


def available() -> str | None:
    """None when QUIC can be used in this process, else the reason why not."""
    return native_problem()
