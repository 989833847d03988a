"""Options that stand for settings: what several commands take, and how children are told."""

from collections.abc import Mapping
from typing import Annotated

import typer

from nexar.config import Config, settings
from nexar.errors import ConfigError

Elastic = Annotated[bool, typer.Option("--elastic", help="Admit nodes after the cluster has formed.")]
Least = Annotated[int | None, typer.Option("--min", help="With fewer members a checkpoint waits for more.")]
Most = Annotated[int | None, typer.Option("--max", help="More members than this are refused.")]


def elastic_settings(*, elastic: bool, least: int | None, most: int | None) -> dict[str, object]:
    """The settings that the three options stand for; those that were not given are left out."""
    given = {
        "elastic_enabled": elastic or None,
        "elastic_min_world_size": least,
        "elastic_max_world_size": most,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_elastic(config: Config, *, least: int | None, most: int | None) -> None:
    """ConfigError for an option that would mean nothing: a cluster that is not elastic has one size."""
    for option, value in (("--min", least), ("--max", most)):
        if value is not None and not config.elastic_enabled:
            raise ConfigError(variable=option, value=value, allowed="only in an elastic cluster", hint="give --elastic")


def as_variables(given: Mapping[str, object]) -> dict[str, str]:
    """The same settings as variables, for children."""
    names = {setting.name: setting.variable for setting in settings()}
    return {names[name]: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
