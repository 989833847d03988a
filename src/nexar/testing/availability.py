"""Which transports can be used on this machine, for tests and examples that say why they leave one out."""

from __future__ import annotations


def why_absent(scheme: str) -> str | None:
    """Why this transport cannot be used here; None if it can."""
    if scheme == "quic":
        from nexar.transport.quic import available  # noqa: PLC0415

        return available()
    if scheme == "shm":
        from nexar.transport.shm.support import missing_support  # noqa: PLC0415

        return missing_support()
    return None
