"""Environments as launchers make them, kept as files."""

from pathlib import Path

_FOLDER = Path(__file__).with_name("environments")


def recorded(name: str) -> dict[str, str]:
    lines = (_FOLDER / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
