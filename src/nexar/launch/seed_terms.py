"""What rank 0 and the seed process it starts tell each other: one line each way. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from nexar.config import Config, settings


class SeedTerms(msgspec.Struct, frozen=True):
    """To the seed: what to open. It travels through a pipe: the settings hold the secret."""

    size: int
    listen: str
    settings: Mapping[str, Any]


class SeedReady(msgspec.Struct, frozen=True, tag="ready"):
    """From the seed: it is open."""

    ticket: str
    address: str
    pid: int


class SeedFailed(msgspec.Struct, frozen=True, tag="failed"):
    """From the seed: it cannot open, and why."""

    reason: str


def changed_settings(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults: what makes the same `Config` on the other side."""
    values = {setting.name: (getattr(config, setting.name), setting.default) for setting in settings()}
    return {name: value for name, (value, default) in values.items() if value != default}
