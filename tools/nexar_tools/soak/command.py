"""Runs a soak test: `python -m nexar_tools.soak --minutes 20 --seed 7`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from typing import Final

from nexar_tools.network_namespaces import permitted
from nexar_tools.soak.campaign import Campaign, SoakFailure
from nexar_tools.soak.hosts import SoakHosts

_HOSTS: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if no error was found."""
    given = _parser().parse_args(arguments)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="nexar-soak-"))
    folder.mkdir(exist_ok=True)
    _write(f"soak for {given.minutes:g} minutes with --seed {given.seed}; output in {folder}")
    with SoakHosts(_hosts(given.hosts), loss=given.loss, partition_seconds=60 * given.partition_minutes) as hosts:
        campaign = Campaign(folder, given.seed, _write, hosts=hosts)
        try:
            campaign.run(given.minutes)
        except SoakFailure as failure:
            _write(f"{failure}\n{campaign.summary()}\nFAILED, with --seed {given.seed}")
            return 1
    _write(f"{campaign.summary()}\nall results were right, progress never stopped, nothing leaked")
    if given.folder is None:
        shutil.rmtree(folder)
    return 0


def _hosts(wanted: int | None) -> int:
    """Hosts that can be had here."""
    reason = permitted() if wanted is None else None
    if reason:
        _write(f"one host, without loss and partitions: {reason}")
    return wanted or (1 if reason else _HOSTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nexar_tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the kills")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 31), help="random seed; printed")
    parser.add_argument("--hosts", type=int, help=f"network namespaces; default: {_HOSTS} if permitted, else 1")
    parser.add_argument("--loss", type=float, default=1.0, help="percent of the packets between hosts")
    parser.add_argument("--partition-minutes", type=float, default=5.0, help="minutes between partitions; 0: none")
    parser.add_argument("--folder", help="output folder; default: a temporary one, kept after a failure")
    return parser


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
