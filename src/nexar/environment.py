"""The only reader of the process environment.

The first value wins: an argument, the variable `NEXAR_*`, the TOML file that `NEXAR_CONFIG` names, the default. An
unknown variable or key is an error.
"""

import difflib
import os
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nexar.config import Config, Setting, ValueRefused, settings
from nexar.errors import ConfigError

PREFIX = "NEXAR_"
FILE_VARIABLE = "NEXAR_CONFIG"

LAUNCHER_VARIABLES: frozenset[str] = frozenset({"NEXAR_LAUNCHER", "NEXAR_LAUNCH", "NEXAR_JOINER", "NEXAR_EXIT_PIPE"})
"""Variables that a nexar launcher sets for its children and that are not settings."""

TICKET_VARIABLE = "NEXAR_TICKET"
_taken: dict[str, str] = {}  # removed from the environment by `take_ticket`

DEFAULT = "default"
ARGUMENT = "argument"


@dataclass(frozen=True, slots=True)
class Effective:
    """Origins: `argument`, the variable, the file, or `default`."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    origin: str


def effective(arguments: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Effective:
    """`environ` replaces the process environment. Raises ConfigError."""
    texts = _present({**_taken, **os.environ} if environ is None else environ)
    given = {**_from_file(texts.get(FILE_VARIABLE)), **_from_variables(texts), **_from_arguments(arguments or {})}
    values: dict[str, Any] = {name: one.value for name, one in given.items()}
    origins = {setting.name: given[setting.name].origin if setting.name in given else DEFAULT for setting in settings()}
    return Effective(Config(**values), origins)


def inherited() -> dict[str, str]:
    """A copy."""
    return dict(os.environ)


def take_ticket() -> None:
    """Remove the ticket from the environment, so that child processes and dumps do not get it. This process still reads
    it as a setting.
    """
    ticket = os.environ.pop(TICKET_VARIABLE, "")
    if ticket:
        _taken[TICKET_VARIABLE] = ticket


def take(variable: str) -> str:
    """Remove a variable and return it; empty if it was not set."""
    return os.environ.pop(variable, "")


def _present(environ: Mapping[str, str]) -> dict[str, str]:
    """An empty variable counts as unset."""
    ours = {name: text.strip() for name, text in environ.items() if name.startswith(PREFIX)}
    return {name: text for name, text in ours.items() if text}


def _from_variables(texts: Mapping[str, str]) -> dict[str, _Given]:
    by_variable = {setting.variable: setting for setting in settings()}
    given = {}
    for variable, text in texts.items():
        setting = by_variable.get(variable)
        if setting is not None:
            given[setting.name] = _Given(_parse(setting, text), variable)
        elif variable != FILE_VARIABLE and variable not in LAUNCHER_VARIABLES:
            raise _unknown(variable, (*by_variable, FILE_VARIABLE))
    return given


def _from_file(path: str | None) -> dict[str, _Given]:
    if path is None:
        return {}
    by_name = {setting.name: setting for setting in settings()}
    given = {}
    found, status = _load(path)
    for name, value in found.items():
        if name not in by_name:
            raise _unknown(name, by_name, f" (in {path})")
        if by_name[name].secret:
            _check_private(path, status, name)
        given[name] = _Given(_accept(by_name[name], value, path), path)
    return given


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, _Given]:
    by_name = {setting.name: setting for setting in settings()}
    for name in arguments:
        if name not in by_name:
            raise _unknown(name, by_name)
    return {name: _Given(value, ARGUMENT) for name, value in arguments.items()}


def _check_private(path: str, status: os.stat_result, name: str) -> None:
    """Raises ConfigError if others can read or write a file with a secret."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o066:
        hint = f"others can read or write it (mode {mode:04o}); chmod 600 {shlex.quote(path)}"
    elif status.st_uid not in {os.geteuid(), 0}:
        hint = f"it belongs to user {status.st_uid}; chown {os.geteuid()} {shlex.quote(path)}"
    else:
        return
    allowed = f"a file that its owner alone can read and write, since it holds {name}"
    raise ConfigError(variable=FILE_VARIABLE, value=path, allowed=allowed, hint=hint)


def _load(path: str) -> tuple[dict[str, Any], os.stat_result]:
    """The status is of the file that was read: the path may name another one later."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file), os.fstat(file.fileno())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(variable=FILE_VARIABLE, value=path, allowed="a readable TOML file", hint=reason) from error


def _parse(setting: Setting, text: str) -> object:
    try:
        return setting.kind.parse(text)
    except ValueRefused:
        raise setting.refuse(text) from None


def _accept(setting: Setting, value: object, path: str) -> object:
    """A value has its TOML type, or is the variable's text."""
    try:
        return setting.kind.parse(value.strip()) if isinstance(value, str) else setting.kind.accept(value)
    except ValueRefused:
        raise setting.refuse(value, hint=f"in {path}") from None


def _unknown(name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The value is not shown: it may be a token under a mistyped name."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "run `nexar config` for the list"
    return ConfigError(variable=name, value="…", allowed="nothing", hint=hint + where, unknown=True)
