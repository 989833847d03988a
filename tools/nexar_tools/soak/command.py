"""Runs a soak test: `python -m nexar_tools.soak --minutes 20 --seed 7`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

from nexar_tools.soak.campaign import Campaign, SoakFailure


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if no error was found."""
    given = _parser().parse_args(arguments)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="nexar-soak-"))
    folder.mkdir(exist_ok=True)
    _write(f"soak for {given.minutes:g} minutes with --seed {given.seed}; output in {folder}")
    campaign = Campaign(folder, given.seed, _write)
    try:
        campaign.run(given.minutes)
    except SoakFailure as failure:
        _write(f"{failure}\n{campaign.summary()}\nFAILED, with --seed {given.seed}")
        return 1
    _write(f"{campaign.summary()}\nall results were right, progress never stopped, nothing leaked")
    if given.folder is None:
        shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nexar_tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the kills")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 31), help="random seed; printed")
    parser.add_argument("--folder", help="output folder; default: a temporary one, kept after a failure")
    return parser


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
