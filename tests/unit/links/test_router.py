import pytest

from nexar.errors import Revoked, UsageError
from nexar.links.sending import About
from nexar.wire.frame import Space
from tests.unit.links.conftest import Pair

TAG = About(space=Space.TAGGED, tag=7)


def test_a_generation_that_is_over_cannot_be_opened_again(pair: Pair) -> None:
    router = pair.left.router
    router.open(3, 2)
    with pytest.raises(UsageError, match="generation 1 of communicator 3 is over"):
        router.open(3, 1)


def test_a_new_generation_revokes_the_one_before(pair: Pair) -> None:
    old = pair.left.router.open(3)
    receive = old.post(None, source=2, space=Space.TAGGED, tag=1)
    pair.left.router.open(3, 1)
    with pytest.raises(Revoked):
        receive.result()
    with pytest.raises(Revoked):
        old.post(None, source=2, space=Space.TAGGED, tag=1)


def test_frames_kept_for_a_generation_that_is_skipped_are_dropped(pair: Pair) -> None:
    pair.left.router.open(3, 1)
    pair.to_right.post_send(3, memoryview(b"kept"), about=TAG)
    pair.to_right.post_send(0, memoryview(b"marker"), about=TAG)
    marker = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)
    pair.right.wait(marker)
    router = pair.right.router
    assert sum(router._unopened_bytes.values()) > 0
    router.open(3, 2)
    assert router.stale_frames == 1
    assert sum(router._unopened_bytes.values()) == 0
    assert not router._unopened
