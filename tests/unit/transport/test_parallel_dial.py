import socket
import time
from collections import deque
from itertools import pairwise

import pytest

from nexar.errors import UsageError
from nexar.transport.base import ConnectRefused
from nexar.transport.parallel_dial import ADDRESS_STAGGER, TargetFailed, dial_in_parallel

NEVER = float("inf")


class ScriptedDial:
    """What each place does, and after how many seconds; (seconds, text) or (seconds, Failed)."""

    def __init__(self, fates):
        self.fates = fates
        self.begun = {}
        self.running = {}
        self.called_off = None

    def begin(self, target):
        self.begun[target] = time.monotonic()
        after, outcome = self.fates.get(target, (NEVER, None))
        if after < 0:
            raise outcome
        self.running[target] = (self.begun[target] + after, outcome)

    def wait(self, timeout):
        target = min(self.running, key=lambda target: self.running[target][0])
        due, outcome = self.running[target]
        now = time.monotonic()
        time.sleep(min(max(due - now, 0.0), max(timeout, 0.0)))
        if due > now + timeout:
            return None
        del self.running[target]
        return target, outcome

    def describe(self, target):
        return f"<{target}>"

    def cancel_all(self):
        assert self.called_off is None, "called off twice"
        self.called_off = list(self.running)


def run(fates, *, address="somewhere:1", targets=None, timeout=5.0):
    dial = ScriptedDial(fates)
    found = targets or list(fates)
    try:
        return dial, dial_in_parallel(address, time.monotonic() + timeout, lambda _: list(found), dial)
    except (ConnectRefused, TimeoutError) as error:
        return dial, error


def test_one_that_answers_at_once_is_not_raced():
    dial, (target, made) = run({"here": (0.0, "HERE"), "there": (0.0, "THERE")})
    assert (target, made) == ("here", "HERE")
    assert list(dial.begun) == ["here"]


def test_places_begin_one_after_another_while_nobody_answers():
    dial, (target, _) = run({"one": (NEVER, None), "two": (NEVER, None), "three": (0.0, "there")})
    assert target == "three"
    assert all(
        ADDRESS_STAGGER <= later - earlier < 20 * ADDRESS_STAGGER for earlier, later in pairwise(dial.begun.values())
    )
    assert dial.called_off == ["one", "two"]


def test_one_that_fails_makes_way_at_once():
    refused = TargetFailed("refused")
    dial, (target, _) = run({"one": (0.0, refused), "two": (-1, refused), "three": (0.0, "there")})
    assert target == "three"
    assert dial.begun["three"] - dial.begun["one"] < ADDRESS_STAGGER


def test_the_quickest_wins_although_it_began_later():
    dial, (target, _) = run({"slow": (1.0, "slow"), "quick": (0.0, "quick")})
    assert target == "quick"
    assert dial.called_off == ["slow"]


def test_one_that_is_not_believed_does_not_end_the_race():
    impostor = TargetFailed("an impostor", verification=True)
    _, (target, _) = run({"impostor": (0.0, impostor), "friend": (0.1, "friend")})
    assert target == "friend"


def test_the_only_reason_stands_alone():
    _, error = run({"one": (0.0, TargetFailed("connection refused"))})
    assert isinstance(error, ConnectRefused)
    assert (error.address, error.reason, error.verification) == ("somewhere:1", "connection refused", False)


def test_every_reason_is_reported_with_its_place():
    _, error = run({"one": (0.0, TargetFailed("connection refused")), "two": (-1, TargetFailed("no route"))})
    assert isinstance(error, ConnectRefused)
    assert error.reason == "<one>: connection refused; <two>: no route"


def test_who_was_not_believed_is_reported_although_others_were_silent():
    impostor = TargetFailed("an impostor", verification=True)
    _, error = run({"impostor": (0.0, impostor), "silent": (NEVER, None)}, timeout=0.1)
    assert isinstance(error, ConnectRefused)
    assert error.verification
    assert error.reason == "<impostor>: an impostor; <silent>: no answer in time"


def test_advice_is_given_once_and_only_if_somebody_was_not_believed():
    impostor = TargetFailed("an impostor", verification=True)
    for result, expected in (
        (impostor, "<a>: an impostor; <b>: an impostor (do this)"),
        (TargetFailed("no"), "<a>: no; <b>: no"),
    ):
        dial = ScriptedDial({"a": (0.0, result), "b": (0.0, result)})
        with pytest.raises(ConnectRefused) as refused:
            dial_in_parallel("somewhere:1", time.monotonic() + 5, lambda _: ["a", "b"], dial, "do this")
        assert refused.value.reason == expected


def test_silence_to_the_end_is_a_timeout_that_keeps_the_other_reasons():
    begin = time.monotonic()
    dial, error = run({"deaf": (0.0, TargetFailed("refused")), "silent": (NEVER, None)}, timeout=0.1)
    assert isinstance(error, TimeoutError)
    assert str(error) == "cannot connect to somewhere:1: <deaf>: refused; <silent>: no answer in time"
    assert 0.1 <= time.monotonic() - begin < 2
    assert dial.called_off == ["silent"]


def test_no_time_at_all_is_a_timeout():
    dial, error = run({"silent": (NEVER, None)}, timeout=-1.0)
    assert isinstance(error, TimeoutError)
    assert dial.called_off == ["silent"]


def test_any_other_exception_ends_the_race_and_calls_the_rest_off():
    dial = ScriptedDial({"one": (NEVER, None)})
    dial.wait = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        dial_in_parallel("somewhere:1", time.monotonic() + 5, lambda _: ["one"], dial)
    assert dial.called_off == ["one"]


def test_a_name_without_addresses_is_refused():
    with pytest.raises(ConnectRefused, match="no address"):
        dial_in_parallel("somewhere:1", time.monotonic() + 5, lambda _: [], ScriptedDial({}))


def test_several_addresses_are_tried_numbers_first_and_each_place_once():
    asked = []
    targets = {"10.0.0.1:1": ["a"], "[fd00::1]:1": ["b"], "name:1": ["c", "a", "d", "d"]}

    def resolve(text):
        asked.append(text)
        return targets[text]

    dial = ScriptedDial(dict.fromkeys("abcd", (0.0, TargetFailed("refused"))))
    with pytest.raises(ConnectRefused):
        dial_in_parallel("name:1, 10.0.0.1:1,[fd00::1]:1", time.monotonic() + 5, resolve, dial)
    assert asked == ["10.0.0.1:1", "[fd00::1]:1", "name:1"]
    assert list(dial.begun) == ["a", "b", "c", "d"]


def test_a_name_is_not_looked_up_if_a_number_answers_at_once():
    asked = deque()
    dial = ScriptedDial({"a": (0.0, "there")})
    dial_in_parallel("name:1,10.0.0.1:1", time.monotonic() + 5, lambda text: asked.append(text) or ["a"], dial)
    assert list(asked) == ["10.0.0.1:1"]


def test_a_name_that_cannot_be_looked_up_leaves_the_others_in_the_race():
    def resolve(text):
        if "nowhere" in text:
            raise OSError(-2, "Name or service not known")
        return [text]

    dial = ScriptedDial({"else:1": (0.0, TargetFailed("refused"))})
    with pytest.raises(ConnectRefused) as refused:
        dial_in_parallel("nowhere:1,else:1", time.monotonic() + 5, resolve, dial)
    assert refused.value.reason == "nowhere:1: Name or service not known; <else:1>: refused"
    with pytest.raises(ConnectRefused) as refused:
        dial_in_parallel("nowhere:1", time.monotonic() + 5, resolve, ScriptedDial({}))
    assert refused.value.reason == "Name or service not known"


def test_what_is_no_address_is_refused_before_anything_is_dialed():
    dial = ScriptedDial({})
    with pytest.raises(UsageError):
        dial_in_parallel("10.0.0.1:1,nonsense", time.monotonic() + 5, lambda _: ["a"], dial)
    assert dial.begun == {}


def test_a_host_name_that_cannot_be_resolved_is_called_so():
    def unknown(_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ConnectRefused) as refused:
        dial_in_parallel("nosuch:1", time.monotonic() + 5.0, unknown, ScriptedDial({}))
    assert refused.value.reason == "the host name 'nosuch' cannot be resolved (Name or service not known)"
