"""`nexar config`: prints the effective settings and their origins."""

import json
from typing import Annotated

import typer

from nexar.cli.exit_codes import GOOD, exit_code_of
from nexar.config import settings
from nexar.environment import Effective, effective


def config(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the effective value of each setting and its origin."""

    def action() -> int:
        found = effective()
        print(_json(found) if as_json else _table(found))
        return GOOD

    raise typer.Exit(exit_code_of(action))


def _facts(found: Effective) -> list[dict[str, object]]:
    return [
        {
            "name": setting.name,
            "variable": setting.variable,
            "value": setting.show(getattr(found.config, setting.name)),
            "unit": setting.unit,
            "origin": found.origins[setting.name],
        }
        for setting in settings()
    ]


def _json(found: Effective) -> str:
    return json.dumps(_facts(found), indent=2)


def _table(found: Effective) -> str:
    rows = [(str(fact["variable"]), _words(fact["value"]), str(fact["origin"])) for fact in _facts(found)]
    rows.insert(0, ("setting", "value", "origin"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def _words(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else f"{value:.0f}"
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
