import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from nexar.errors import UsageError
from nexar.transport.foreign import Foreign, TransportBroke
from tests.unit.links.waiting import Sleep, Told

LOGGER = "nexar.transport.foreign"


class Torn(Told):
    """Raises, whatever it is asked, once it is torn."""

    address = "the second drawer"
    torn = False

    def poll(self) -> bool:
        self._check()
        return super().poll()

    def arm(self) -> bool:
        self._check()
        return False

    def due(self) -> float | None:
        self._check()
        return 3.0

    @property
    def spins(self) -> bool:
        self._check()
        return True

    def close(self) -> None:
        super().close()
        self._check()

    def _check(self) -> None:
        if self.torn:
            raise RuntimeError("no paper left")


@pytest.fixture
def torn() -> Torn:
    return Torn(Sleep())


@pytest.fixture
def foreign(torn: Torn) -> Foreign:
    return Foreign(torn, lambda error: f"the transport of somebody raised {error}")


def test_what_it_is_asked_goes_through(foreign: Foreign, torn: Torn) -> None:
    torn.tell(lambda: None)
    assert foreign.poll()
    assert (foreign.arm(), foreign.due(), foreign.spins) == (False, 3.0, True)
    assert (foreign.scheme, foreign.address, foreign.address_for(3)) == ("told", "the second drawer", torn.address)
    foreign.close()
    foreign.abandon()
    assert torn.closed
    assert torn.abandoned


@pytest.mark.parametrize(
    "ask", [Foreign.poll, Foreign.arm, Foreign.due, attrgetter("spins")], ids=["poll", "arm", "due", "spins"]
)
def test_what_it_raises_while_it_is_driven_names_it(
    foreign: Foreign, torn: Torn, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    torn.torn = True
    with pytest.raises(TransportBroke, match="of somebody raised no paper left") as broke:
        ask(foreign)
    assert isinstance(broke.value, UsageError)
    assert isinstance(broke.value.__cause__, RuntimeError)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


def test_it_is_logged_once(foreign: Foreign, torn: Torn, caplog: pytest.LogCaptureFixture) -> None:
    torn.torn = True
    for _ in range(2):
        with pytest.raises(TransportBroke):
            foreign.poll()
    foreign.close()
    assert [(record.name, record.levelno) for record in caplog.records] == [(LOGGER, logging.ERROR)]


def test_a_close_that_raises_is_told_and_over(foreign: Foreign, torn: Torn, caplog: pytest.LogCaptureFixture) -> None:
    torn.torn = True
    foreign.close()
    assert torn.closed
    assert "no paper left" in caplog.text
