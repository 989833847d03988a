"""`nexar run`: starts ranks on this host, and can trace the run."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from nexar.cli.cluster_options import (
    NO_ENTRY,
    Elastic,
    Least,
    Most,
    PageAt,
    Ticket,
    TicketFile,
    WriteTicket,
    as_variables,
    check_elastic,
    elastic_settings,
    entry_options,
    page_address,
    shown_cluster,
)
from nexar.cli.exit_codes import exit_code_of, print_message
from nexar.config import Config
from nexar.environment import effective, inherited
from nexar.errors import ConfigError, UsageError
from nexar.launch.output import Console, standard_console
from nexar.launch.plan import Command, choose_form, parse_filter, without_outer_launch
from nexar.launch.supervisor import OnFailure, SupervisorOptions

TraceTo = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace of the run, for ui.perfetto.dev.")
]


@contextmanager
def traced(path: Path | None) -> Iterator[dict[str, object]]:
    """Yield settings that make ranks write trace parts; write the trace when the block ends, even by an error. Raises
    UsageError.
    """
    if path is None:
        yield {}
        return
    problem = _problem(path)
    if problem:
        raise UsageError(
            f"--trace {path} cannot be written: {problem}; name a file in a directory that you can write to"
        )
    with tempfile.TemporaryDirectory(prefix="nexar-trace-") as folder:
        try:
            yield {"trace_dir": folder}
        finally:
            merge([Path(folder)], path)


def _problem(path: Path) -> str:
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return "there is no such directory"
    if path.exists() and not path.is_file():
        return "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
    return "" if os.access(path.resolve().parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def merge(directories: list[Path], path: Path) -> int:
    """Return the number of ranks; 0: there were no parts, and the file is not touched."""
    from nexar.observe.trace_merge import read_parts, write_trace  # noqa: PLC0415  # imports numpy

    found = read_parts(directories)
    for name, reason in found.unreadable.items():
        print_message(f"{name} is left out of the trace: {reason}")
    if found.earlier:
        print_message(f"skipped {found.earlier} parts of earlier runs")
    if not found.parts:
        places = ", ".join(map(str, directories))
        print_message(
            f"no parts of a trace in {places}, so {path} is not written; ranks write them when they end, "
            "if NEXAR_TRACE_DIR names the directory"
        )
        return 0
    written = write_trace(path, found.parts)
    missing = f"; {written.missed} earlier calls were not kept" if written.missed else ""
    print_message(
        f"{written.calls} calls of {written.ranks} ranks are in {path}{missing}; open it at https://ui.perfetto.dev"
    )
    return written.ranks


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed to SCRIPT unchanged.")] = None,
    *,
    count: Annotated[int, typer.Option("-n", "--nproc-per-node", help="Number of ranks on this host.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, not Python.")] = False,
    ticket: Ticket = None,
    ticket_file: TicketFile = None,
    seed: Annotated[str | None, typer.Option(help="HOST:PORT of the seed; the token is NEXAR_CLUSTER_TOKEN.")] = None,
    first_rank: Annotated[int | None, typer.Option(help="First rank of this host; unset: the seed assigns it.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Write the output to files here, one per rank.")] = None,
    tee: Annotated[bool, typer.Option("--tee", help="With --log-dir: show the output too.")] = False,
    local_ranks_filter: Annotated[str | None, typer.Option(help="Show only these local ranks: 0,2")] = None,
    elastic: Elastic = False,
    least: Least = None,
    most: Most = None,
    max_restarts: Annotated[
        int, typer.Option(help="With --elastic: restart at most this many failed ranks in total.", show_default=False)
    ] = 0,
    on_failure: Annotated[
        str | None,
        typer.Option(
            help="When a rank fails: stop the others, or let them continue. [default: stop; continue with --elastic]",
            show_default=False,
        ),
    ] = None,
    page: PageAt = None,
    write_ticket: WriteTicket = None,
    trace: TraceTo = None,
) -> None:
    """Start N ranks on this host and wait for them."""

    def action() -> int:
        from nexar.launch.run import RunRequest, run_host  # noqa: PLC0415  # wrong options are rejected without loading it

        given = elastic_settings(elastic=elastic, least=least, most=most)
        variables = without_outer_launch(inherited()) | as_variables(given)
        command = Command(choose_form(module=module, no_python=no_python), target, tuple(arguments or ()))
        _check(count, command)
        file_timeout = effective({**given, **NO_ENTRY}, variables).config.formation_timeout
        config = effective(
            {**given, **entry_options(ticket, ticket_file, seed, file_timeout=file_timeout)}, variables
        ).config
        _check_port(count, config)
        check_elastic(config, least=least, most=most)
        _check_restarts(max_restarts, config)
        _check_most(count, config)
        _check_metrics(count, config)
        address = page_address(page)
        _check_own(config, page=page, write_ticket=write_ticket)
        options = SupervisorOptions(
            shown=parse_filter(local_ranks_filter, count),
            log_dir=_create_directory(log_dir),
            tee=tee,
            on_failure=_on_failure(on_failure, config),
            max_restarts=0 if config.recovery_policy == "abort" else max_restarts,
        )
        with traced(trace) as more:
            request = RunRequest(
                count=count,
                command=command,
                config=config,
                options=options,
                inherited=variables | as_variables(more),
                first_rank=first_rank,
                when_open=lambda service: shown_cluster(service, address, write_ticket),
            )
            return run_host(request, _console())

    raise typer.Exit(exit_code_of(action))


def _check(count: int, command: Command) -> None:
    """Reports an error once instead of once per rank."""
    if count < 1:
        raise ConfigError(variable="-n", value=count, allowed="a whole number, 1 or more")
    if command.form == "script" and not Path(command.target).exists():
        raise UsageError(f"the script {command.target} does not exist (looked for in {Path.cwd()})")
    if command.form == "program" and shutil.which(command.target) is None:
        raise UsageError(f"the program {command.target} does not exist or cannot be executed")
    if command.form == "module" and not _is_module(command.target):
        raise UsageError(f"there is no module {command.target}; python -m {command.target} would not find it either")


def _check_port(count: int, config: Config) -> None:
    if count > 1 and config.port:
        allowed = "one rank on this host: several cannot have the same port"
        raise ConfigError(variable="NEXAR_PORT", value=config.port, allowed=allowed, hint="give NEXAR_PORT_RANGE")


def _check_metrics(count: int, config: Config) -> None:
    if config.metrics_port is not None:
        from nexar.observe.metrics import check_metrics  # noqa: PLC0415  # imports numpy

        check_metrics(config, count)


def _check_most(count: int, config: Config) -> None:
    most = config.elastic_max_world_size
    if config.elastic_enabled and 0 < most < count:
        allowed = f"{count} or more: so many ranks are to be started (-n)"
        raise ConfigError(variable="--max", value=most, allowed=allowed)


def _check_restarts(max_restarts: int, config: Config) -> None:
    if max_restarts < 0:
        raise ConfigError(variable="--max-restarts", value=max_restarts, allowed="a whole number, 0 or more")
    if max_restarts and not config.elastic_enabled:
        allowed = "0 in a cluster that is not elastic: it does not admit restarted ranks"
        raise ConfigError(variable="--max-restarts", value=max_restarts, allowed=allowed, hint="give --elastic too")


def _on_failure(given: str | None, config: Config) -> OnFailure | None:
    """None: the cluster decides. Raises ConfigError for a contradiction."""
    abort = config.recovery_policy == "abort"
    if given is not None and given not in get_args(OnFailure):
        raise ConfigError(variable="--on-failure", value=given, allowed="stop or continue")
    if given == "continue" and abort:
        allowed = "stop, with NEXAR_RECOVERY_POLICY=abort: no rank continues after a loss"
        raise ConfigError(variable="--on-failure", value=given, allowed=allowed)
    return "stop" if abort else cast("OnFailure | None", given)


def _check_own(config: Config, *, page: str | None, write_ticket: Path | None) -> None:
    if config.ticket is None and config.seed is None:
        return
    if page is not None:
        raise UsageError("--page: the process that opens the cluster serves the page; give --page to `nexar seed`")
    if write_ticket is not None:
        raise UsageError("--write-ticket is for a cluster that this command opens; this one has a ticket already")


def _is_module(name: str) -> bool:
    """Does not search below the outermost package, which would run its code in the launcher."""
    sys.path.insert(0, "")  # as python -m does
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return False
    finally:
        sys.path.remove("")


def _create_directory(log_dir: Path | None) -> Path | None:
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log-dir {log_dir} cannot be made: {error.strerror}") from error
    return log_dir


def _console() -> Console:
    return standard_console(sys.stdout.buffer, sys.stderr.buffer)
