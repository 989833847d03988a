import time

import pytest

from nexar.transport.attempts import Failed, try_each
from nexar.transport.base import ConnectRefused


def wait_in_vain(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))
    raise TimeoutError


def test_the_first_that_answers_is_taken():
    tried = []

    def attempt(place, until):
        tried.append(place)
        if place == "deaf":
            raise Failed("connection refused")
        return place.upper()

    assert try_each("somewhere:1", ["deaf", "here", "there"], time.monotonic() + 5, attempt) == "HERE"
    assert tried == ["deaf", "here"]


def test_one_that_is_silent_leaves_the_others_their_share():
    begin = time.monotonic()
    shares = {}

    def attempt(place, until):
        shares[place] = until - time.monotonic()
        if place != "last":
            wait_in_vain(until)
        return place

    assert try_each("somewhere:1", ["first", "second", "last"], begin + 0.6, attempt) == "last"
    assert 0.35 < time.monotonic() - begin < 0.6
    assert all(0.1 < share <= 0.2 + 1e-3 for share in shares.values())


def test_time_that_one_did_not_need_goes_to_the_others():
    given = []

    def attempt(place, until):
        given.append(until - time.monotonic())
        raise Failed("connection refused")

    with pytest.raises(ConnectRefused):
        try_each("somewhere:1", ["first", "last"], time.monotonic() + 10, attempt)
    assert given[0] <= 5
    assert given[1] > 9


def test_every_reason_is_told_once():
    def attempt(place, until):
        raise Failed("no route" if place == "far" else "connection refused")

    with pytest.raises(ConnectRefused) as refused:
        try_each("somewhere:1", ["one", "far", "two"], time.monotonic() + 5, attempt)
    assert refused.value.reason == "connection refused; no route"


def test_silence_to_the_end_is_a_timeout_that_keeps_the_other_reasons():
    def attempt(place, until):
        if place == "deaf":
            raise Failed("connection refused")
        wait_in_vain(until)

    with pytest.raises(TimeoutError, match="cannot connect to somewhere:1: connection refused; no answer in time"):
        try_each("somewhere:1", ["deaf", "silent"], time.monotonic() + 0.05, attempt)


def test_any_other_end_is_the_end():
    def attempt(place, until):
        raise ConnectRefused("somewhere:1", "an impostor", verification=True)

    with pytest.raises(ConnectRefused, match="an impostor"):
        try_each("somewhere:1", ["one", "two"], time.monotonic() + 5, attempt)


def test_a_name_without_addresses_is_refused():
    with pytest.raises(ConnectRefused, match="no address"):
        try_each("somewhere:1", [], time.monotonic() + 5, lambda *_: None)
