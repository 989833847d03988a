"""The command `nexar bench`, and the parser for sizes (`8`, `64K`, `128M`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nexar.cli.bench.protocol import MEASURES
from nexar.cli.exit_codes import FAILED, GOOD, exit_code_of, print_message
from nexar.environment import inherited
from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import detect

if TYPE_CHECKING:
    from nexar.cli.bench.report import MeasureOptions


_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30}
_FORM: Final = re.compile(r"(\d+)\s*([KMG]?)i?B?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Return bytes. Raises ConfigError, which names the option."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(variable=option, value=text, allowed="a number of bytes, or one with K, M or G (1024)")
    return int(match[1]) << _UNITS[match[2].upper()]


def series(begin: int, end: int, factor: float) -> Iterator[int]:
    """Return sizes from `begin` to `end`, growing by `factor`."""
    if factor <= 1:
        raise ConfigError(variable="-f", value=factor, allowed="a number above 1")
    if not 0 < begin <= end:
        raise ConfigError(variable="-b", value=begin, allowed=f"1 to the end of the series, {end}")
    size = float(begin)
    while round(size) <= end:
        yield round(size)
        size = max(size * factor, size + 1)


ALL = "all"
_WHAT = f"{', '.join(MEASURES)}, or {ALL}."


def bench(
    what: Annotated[list[str] | None, typer.Argument(metavar="WHAT", help=_WHAT)] = None,
    *,
    begin: Annotated[str, typer.Option("-b", "--begin", help="Smallest size: 8, 64K, 1M.")] = "8",
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64M",
    factor: Annotated[float, typer.Option("-f", "--factor", help="Factor between consecutive sizes.")] = 2,
    sizes: Annotated[str, typer.Option(help="Exactly these sizes: 8,64K,1M.")] = "",
    iterations: Annotated[
        int | None, typer.Option("-n", "--iters", help="Calls per size; unset: 20, or what --seconds allow.")
    ] = None,
    warmups: Annotated[
        int,
        typer.Option(
            "-w", "--warmup-iters", help="Untimed calls before each block; without -n at least 50 ms of them."
        ),
    ] = 5,
    dtype: Annotated[str, typer.Option("-d", "--datatype", help="float32, bfloat16, int8, …")] = "float32",
    op: Annotated[str, typer.Option("-o", "--op", help="sum, prod, min, max, avg, band, …")] = "sum",
    root: Annotated[int, typer.Option("-r", "--root", help="Root of rooted operations.")] = 0,
    ranks: Annotated[int, typer.Option("--ranks", help="Number of ranks, on all hosts together.")] = 2,
    hosts: Annotated[int, typer.Option(help="2: between two network namespaces; needs root.")] = 1,
    mtu: Annotated[int, typer.Option(help="MTU of the link between two hosts.")] = 1500,
    encrypt_bulk: Annotated[
        bool | None, typer.Option("--encrypt-bulk/--no-encrypt-bulk", help="Encrypt large payloads between hosts.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Force one of nexar's algorithms.")] = None,
    against: Annotated[str, typer.Option(help="Measure these too: gloo,openmpi,mpich.")] = "",
    peers: Annotated[Path, typer.Option(help="Directory that `make bench-peers` made.")] = Path(".venv-peers"),
    rounds: Annotated[int, typer.Option(help="Blocks of calls per size; systems take turns.")] = 5,
    seconds: Annotated[float, typer.Option(help="Time per size and system; small sizes get more calls.")] = 0.3,
    timeout: Annotated[float, typer.Option(help="Seconds that a block of calls may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw busbw over size into this file.")] = None,
) -> None:
    """Measure collectives and messages, on this machine or between two hosts on it.

    Columns are those of nccl-tests. A ratio above 1 means that nexar is faster. The exit code is 1 if any result of
    nexar was wrong, or if a system failed. Started by a launcher (nexar run -n 4 -m nexar bench …) it measures the
    ranks of that launch, on all of their hosts.
    """

    def action() -> int:
        # Wrong options are rejected without loading these.
        from nexar.cli.bench.coordinator import BenchSetup, run, run_inside  # noqa: PLC0415
        from nexar.cli.bench.report import BenchRequest, plot_interpreter  # noqa: PLC0415
        from nexar.cli.bench.systems import SystemFailed  # noqa: PLC0415

        start = detect(inherited())
        size = ranks if start is None else start.size
        _check(ranks=size, hosts=1 if start else hosts, root=root, rounds=rounds)
        request = BenchRequest(
            measures=_chosen(what or ["all_reduce"], size),
            sizes=_sizes(sizes) or tuple(series(parse_size(begin, "-b"), parse_size(end, "-e"), factor)),
            options=_options(
                dtype=dtype,
                op=op,
                root=root,
                algorithm=algorithm,
                warmups=warmups,
                iterations=iterations,
                rounds=rounds,
                seconds=seconds,
                timeout=timeout,
            ),
            as_json=as_json,
            plot=plot,
            plot_python=None if plot is None else plot_interpreter(peers.absolute()),
        )
        others = tuple(name.strip() for name in against.split(",") if name.strip())
        if start is not None:
            _check_inside(others, hosts)
            return GOOD if run_inside(request) else FAILED
        setup = BenchSetup(
            ranks=ranks, hosts=hosts, mtu=mtu, encrypt_bulk=encrypt_bulk, others=others, peers=peers.absolute()
        )
        try:
            return GOOD if run(request, setup) else FAILED
        except SystemFailed as failure:
            print_message(str(failure))
            return FAILED

    raise typer.Exit(exit_code_of(action))


def _chosen(what: list[str], ranks: int) -> tuple[str, ...]:
    unknown = [name for name in what if name not in MEASURES and name != ALL]
    if unknown:
        raise UsageError(f"unknown measure {unknown[0]}; give {_WHAT}")
    if ALL in what:
        return tuple(name for name, measure in MEASURES.items() if ranks > 1 or not measure.pair)
    pairs = [name for name in what if MEASURES[name].pair]
    if pairs and ranks < 2:
        raise UsageError(f"{pairs[0]} is measured between two ranks: give --ranks 2 or more")
    return tuple(dict.fromkeys(what))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_size(size, "--sizes") for size in text.split(",")) if text else ()


def _options(
    *,
    dtype: str,
    op: str,
    root: int,
    algorithm: str | None,
    warmups: int,
    iterations: int | None,
    rounds: int,
    seconds: float,
    timeout: float,
) -> MeasureOptions:
    from nexar.cli.bench.measuring import OPERATIONS, Unsupported, dtype_named  # noqa: PLC0415
    from nexar.cli.bench.report import MeasureOptions  # noqa: PLC0415

    if op not in OPERATIONS:
        raise ConfigError(variable="-o", value=op, allowed=", ".join(OPERATIONS))
    try:
        itemsize = dtype_named(dtype).itemsize
    except Unsupported:
        raise ConfigError(variable="-d", value=dtype, allowed="a dtype of NumPy or of ml_dtypes") from None
    return MeasureOptions(
        dtype=dtype,
        itemsize=itemsize,
        op=op,
        root=root,
        algorithm=algorithm,
        warmups=warmups,
        least_calls=20 if iterations is None else iterations,
        exactly=iterations is not None,
        rounds=rounds,
        seconds=seconds,
        reply_timeout=timeout,
    )


def _check(*, ranks: int, hosts: int, root: int, rounds: int) -> None:
    if ranks < 1 or ranks % max(1, hosts):
        raise ConfigError(variable="--ranks", value=ranks, allowed=f"a whole number, as many on each of {hosts} hosts")
    if not 0 <= root < ranks:
        raise ConfigError(variable="-r", value=root, allowed=f"0 to {ranks - 1}")
    if rounds < 1:
        raise ConfigError(variable="--rounds", value=rounds, allowed="a whole number, 1 or more")


def _check_inside(others: tuple[str, ...], hosts: int) -> None:
    if others or hosts != 1:
        option = "--against" if others else "--hosts"
        raise UsageError(f"{option} starts ranks of its own; this is a rank of another launch: run it outside of one")
