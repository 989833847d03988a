"""When a certificate is renewed. Pure: the moment and the chance come in.

At two thirds of its life at the latest, so that a seed that is away for a while is no harm; and, so that the nodes of a
cluster that formed together do not all come at once, each a little earlier by a number that it drew.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from cryptography import x509

from nexar.errors import UsageError
from nexar.security.authority import CLOCK_SKEW
from nexar.security.identity import UNREADABLE, NotOurs

_LATEST: Final = 2 / 3
_EARLIEST: Final = 1 / 2
_LONGEST_PAUSE: Final = timedelta(minutes=1)


def read_validity(certificate: bytes) -> tuple[datetime, datetime]:
    """From when and until when a certificate (PEM; of a chain, the first) is valid, in UTC. Raises NotOurs."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        return loaded.not_valid_before_utc, loaded.not_valid_after_utc
    except UNREADABLE as error:
        raise NotOurs(f"it cannot be decoded ({error})") from error


def renew_at(not_before: datetime, not_after: datetime, now: datetime, spread: float) -> datetime:
    """When to ask for the next certificate; `spread` is a number from 0 (latest) to 1 (earliest), drawn once per node.

    Never in the past, and never at once: a twentieth of the life passes first, a minute at most. So even where the
    clocks of node and seed disagree by more than a whole life, renewing does not become a busy loop. A certificate that
    expired while nobody looked is renewed after that pause too. UsageError for a spread outside 0..1.
    """
    if not 0.0 <= spread <= 1.0:
        raise UsageError(f"a spread of {spread} cannot be; draw it from 0 to 1")
    issued = not_before + CLOCK_SKEW  # the authority dates its certificates back by that much
    life = max(not_after - issued, timedelta(0))
    due = issued + life * (_LATEST - spread * (_LATEST - _EARLIEST))
    return max(due, now + min(life / 20, _LONGEST_PAUSE))
