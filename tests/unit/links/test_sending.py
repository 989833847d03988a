"""What a sender does with the messages of its peer, and with sends that are cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from nexar.errors import Cancelled
from nexar.links.link_state import PostedSend
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Frame, FrameKind, Space
from tests.unit.links.conftest import MakePair, Pair
from tests.unit.links.test_link import LARGE, large, receive

TAG = MessageHeader(space=Space.TAGGED, tag=7)


def test_a_send_after_the_last_waiting_send_was_cancelled_arrives(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=262_144, eager_limit_bytes=1024, early_bytes=8192)
    sends = []
    while not pair.to_right.stats()["sends_stalled"]:
        sends.append(pair.to_right.post_send(0, memoryview(len(sends).to_bytes(4, "little") * 200), about=TAG))
    sends.pop().cancel()  # the last one, and the only one that waits
    for number in range(len(sends)):
        assert receive(pair.right, 1) == number.to_bytes(4, "little") * 200
    pair.to_right.post_send(0, memoryview(b"after"), about=TAG)
    assert receive(pair.right, 1) == b"after"


class Flowing:
    """A large send whose payload flows, and never ends by itself."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sending: Any = pair.to_right._sending
        carrier: Any = self.sending._state.carrier
        self.done_when_withdrawn: list[bool] = []
        monkeypatch.setattr(carrier, "send_payload", lambda *_: None)
        monkeypatch.setattr(carrier, "withdraw_payload", self._withdraw)
        monkeypatch.setattr(pair.right.matching, "announce", lambda *_: pytest.fail("held back"))
        monkeypatch.setattr(carrier, "send_frame", lambda *_: None)
        send = pair.to_right.post_send(0, memoryview(large(1)), about=TAG)
        assert isinstance(send, PostedSend)
        self.send = send
        with self.sending.lock:
            self.sending.granted(send.frame)
        assert send.flowing

    def _withdraw(self, transfer: int) -> None:
        assert transfer == self.send.frame.transfer
        self.done_when_withdrawn.append(self.send.done)


def test_a_payload_that_is_refused_while_it_flows_is_withdrawn_before_the_send_ends(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    flowing = Flowing(make_pair(early_bytes=LARGE), monkeypatch)
    with flowing.sending.lock:
        flowing.sending.refused(flowing.send.frame, "not wanted")
    assert flowing.done_when_withdrawn == [False]
    with pytest.raises(Cancelled, match="not wanted"):
        flowing.send.result()


def test_a_grant_for_a_transfer_that_is_not_known_is_answered_by_withdrawing_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[FrameKind, int]] = []
    sending: Any = pair.to_right._sending
    monkeypatch.setattr(sending._state, "notice", lambda kind, *_, transfer: reported.append((kind, transfer)))
    with sending.lock:
        sending.granted(Frame(kind=FrameKind.GRANT, communicator=0, transfer=99))
    assert reported == [(FrameKind.WITHDRAW, 99)]
