"""Who holds more and more: the seed, and one member after the other that is not killed for a while."""

from __future__ import annotations

import time
from typing import Final

from nexar.testing.soak.census import Census
from nexar.testing.soak.upkeep import Account, Upkeep, middle, upkeep_of

_SAMPLE_SECONDS: Final = 2.0
_PROTECTED_SECONDS: Final = 150.0
_UNPROTECTED_SECONDS: Final = 30.0
"""Between two that are protected: the oldest member has the lowest rank, and that has to die, too."""
_YOUTH: Final = 5.0  # seconds until a process holds what it is going to


class Watch:
    """Of one soak."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._sampled_at = 0.0
        self._turn_at = 0.0
        self.protected: str | None = None
        """Who is not to be killed at the moment."""
        self._seed = Account("the seed")
        self._accounts: dict[str, Account] = {}

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def look(self, now: float, census: Census, seed: int, pids: dict[str, int]) -> None:
        """Take a sample, if it is time. `seed` and `pids` are process ids."""
        if now < self._sampled_at + _SAMPLE_SECONDS or not census.epoch:
            return
        self._sampled_at = now
        self._take_turns(now, census)
        members = [name for name in census.members if now > census.lives[name].started_at + _YOUTH]
        held = {name: found for name in members if (found := upkeep_of(pids[name])) is not None}
        lines = upkeep_of(seed)
        if lines is not None:
            self._seed.add(lines, Upkeep(len(census.alive), 0, 0))
        others = [found for name, found in held.items() if name != self.protected]
        if self.protected in held and others:
            account = self._accounts.setdefault(self.protected, Account(self.protected))
            account.add(held[self.protected], middle(others))

    def _take_turns(self, now: float, census: Census) -> None:
        """Somebody is protected for a while, then nobody."""
        if now < self._turn_at:
            return
        chosen = None if self.protected is not None or not census.members else census.members[-1]
        self.protected = chosen
        self._turn_at = now + (_PROTECTED_SECONDS if chosen is not None else _UNPROTECTED_SECONDS)

    def leaks(self) -> list[str]:
        """Of all that were looked at, in words."""
        return [leak for account in (self._seed, *self._accounts.values()) for leak in account.leaks()]

    def summary(self) -> str:
        """How much more each of them held in the end."""
        return "\n".join(f"{each.name}: {each.growth} more" for each in (self._seed, *self._accounts.values()))
