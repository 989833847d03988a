"""Measures each transport, alone and through a Link, beside plain TCP and TLS sockets.

    python benchmarks/transport.py --quick
    python benchmarks/transport.py --transports quic,TLS --places loopback,mtu9000 --repetitions 5 --json figures.json

Each figure is the median over repetitions, which alternate the order of candidates; a round trip is the median of many.
Takes 15 minutes, with `--quick` less than one.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

import places
from candidates import ALL, REFERENCE, SOCKETS, Candidate
from conversation import BOTH_WAYS, ONE_WAY, ROUND_TRIP
from report import FOUR_RANKS, Question, Results, Row
from rich.console import Console
from sessions import run_session, run_two_at_once

from nexar_tools.peer_process import PeerFailed
from nexar_tools.peer_protocol import HostSpec

SMALL, LARGE = (8, 1 << 10, 64 << 10), (1 << 20, 16 << 20, 64 << 20)
_LARGEST_SMALL = 64 << 10


def main() -> None:
    """Measures and prints."""
    options = parse()
    bench = Bench(options, Console(width=max(132, Console().width)))
    for place in options.places:
        reason = places.refused(place)
        if reason is None:
            bench.measure(place)
            bench.show(place)
        else:
            bench.console.print(f"not measured {places.NAMES[place]}: {reason}")
        if options.json:
            bench.results.save(options.json, facts(options))  # after each place: a long run may be interrupted


class Bench:
    """Candidates × places × repetitions."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.console = console
        self.results = Results()
        self._repetitions: int = options.repetitions
        self._round_trips = [Question(ROUND_TRIP, size) for size in options.sizes if size <= _LARGEST_SMALL]
        large = [size for size in options.sizes if size > _LARGEST_SMALL]
        self._throughput = [Question(kind, size) for kind in (ONE_WAY, BOTH_WAYS) for size in large]
        self._four_ranks: bool = options.four_ranks
        self._plan = self._make_plan(quick=options.quick)
        self._candidates = [candidate for candidate in wanted(options) if self._can(candidate)]

    def _make_plan(self, *, quick: bool) -> dict[str, Any]:
        """The questions of a session, and their durations."""
        seconds, warm_up, stream_bytes = (0.2, 0.1, 128 << 20) if quick else (0.5, 0.2, 256 << 20)
        lengths = {"seconds": seconds, "warm_up": warm_up, "stream_bytes": stream_bytes, "begin": None}
        return {**lengths, "questions": [*self._round_trips, *self._throughput]}

    def _can(self, candidate: Candidate) -> bool:
        reason = candidate.missing()
        if reason is not None:
            self.console.print(f"not measured: {candidate.name}: {reason}")
        return reason is None

    def measure(self, place: str) -> None:
        """All repetitions in one place, every other one in reverse order."""
        here = [candidate for candidate in self._candidates if place == places.LOOPBACK or not candidate.one_host]
        with places.opened(place) as ends:
            for repetition in range(self._repetitions):
                for candidate in here[:: -1 if repetition % 2 else 1]:
                    progress(f"{place}: {repetition + 1}/{self._repetitions} {candidate.name}")
                    self._measure(place, candidate, ends)
        progress("")

    def _measure(self, place: str, candidate: Candidate, ends: tuple[HostSpec, HostSpec]) -> None:
        try:
            samples = run_session(candidate, ends, self._plan)
            if self._four_ranks and place == places.LOOPBACK and not candidate.one_process:
                samples += run_two_at_once(candidate, ends, self._plan)
        except (PeerFailed, OSError) as failure:
            self.console.print(f"{candidate.name} {places.NAMES[place]} failed: {failure}", markup=False)
            return
        for sample in samples:
            self.results.add(place, Row(candidate.transport, candidate.layer), sample)

    def show(self, place: str) -> None:
        """Two tables: round trips and throughput."""
        rows = [Row(candidate.transport, candidate.layer) for candidate in self._candidates]
        four = [Question(FOUR_RANKS, 8)] if self._four_ranks and place == places.LOOPBACK else []
        tables = (("Round trip in µs", [*self._round_trips, *four]), ("Throughput in GB/s", self._throughput))
        for what, questions in tables:
            if questions:
                self.console.print(f"{what} {places.NAMES[place]} (in parentheses: times as good as TLS sockets)")
                self.console.print(self.results.table(place, rows, questions))


def wanted(options: argparse.Namespace) -> list[Candidate]:
    """The selected candidates, and always the reference."""
    asked = [c for c in ALL if c.transport in options.transports and c.layer in options.layers]
    return [c for c in ALL if c in asked or (c.transport, c.layer) == (REFERENCE, SOCKETS)]


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(candidate.transport for candidate in ALL))
    layers = list(dict.fromkeys(candidate.layer for candidate in ALL))
    parser.add_argument("--transports", type=words(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--layers", type=words(layers), default=layers, help=f"of {','.join(layers)}")
    parser.add_argument("--places", type=words(list(places.NAMES)), help=f"of {','.join(places.NAMES)}")
    parser.add_argument("--sizes", type=sizes, help="bytes, with K or M; up to 64K round trips, above it throughput")
    parser.add_argument("--repetitions", type=int, help="sessions per candidate and place")
    parser.add_argument("--quick", action="store_true", help="one short repetition on loopback")
    four = "two pairs at once, on loopback; not with --quick unless asked for"
    parser.add_argument("--four-ranks", action=argparse.BooleanOptionalAction, help=four)
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args()
    options.places = options.places or ([places.LOOPBACK] if options.quick else list(places.NAMES))
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    options.four_ranks = not options.quick if options.four_ranks is None else options.four_ranks
    options.sizes = options.sizes or [*SMALL, *LARGE]
    return options


def words(allowed: list[str]) -> Any:
    """A parser for comma-separated choices."""

    def parse_words(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [word for word in given if word not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return given

    return parse_words


def sizes(text: str) -> list[int]:
    """`8,64K,16M`."""
    factors = {"K": 1 << 10, "M": 1 << 20}
    return [int(word.rstrip("KM")) * factors.get(word[-1], 1) for word in text.split(",")]


def progress(text: str) -> None:
    """Shows progress, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """The circumstances of the measurement."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "repetitions": options.repetitions,
        "quick": options.quick,
    }


if __name__ == "__main__":
    main()
