"""What all ranks of a world must report alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Agreement:
    """Facts by name and key: memberships, changes with `completed_by_all`, values of agree(), results of teams."""

    def __init__(self) -> None:
        self._facts: dict[tuple[str, tuple[int, ...]], tuple[Any, str]] = {}

    def add(self, who: str, report: Mapping[str, Any]) -> str | None:
        """Describes the disagreement if another rank reported another value."""
        key = report["name"], tuple(report["key"])
        value, first = self._facts.setdefault(key, (report["value"], who))
        if value == report["value"]:
            return None
        return f"{key[0]} {list(key[1])}: {first} has {value}, {who} has {report['value']}"
