"""A carrier: the control and the data connection to one peer.

Lanes CONTROL and RPC travel on the control connection, everything else, and the payloads, on the data connection.

While the driving thread may call the sink of this carrier it holds `_delivering`, which nobody else ever waits for but
an abort: so an abort knows that no call follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Final

from nexar.transport.base import SILENT_SINK, Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.payload_table import PayloadTable
from nexar.transport.tls.connection import CarrierEnd, TlsConnection, TlsReceiver, carrier_lost_of
from nexar.transport.tls.sockets import READABLE, WRITABLE, Selector
from nexar.wire.frame import Lane, decode, encode_finish

_LAST_CONTROL_LANE: Final = int(Lane.RPC)
_FINISH_TIMEOUT: Final = encode_finish(0)  # TCP loses nothing on the way, so there is nothing to count


class TlsCarrier(Carrier):
    """See Carrier, and the module."""

    def __init__(
        self,
        peer: Peer,
        control: TlsConnection,
        data: TlsConnection,
        reactor: Selector,
        *,
        scheme: str,
        dialed: bool,
        forget: Callable[[TlsCarrier], None],
    ) -> None:
        """Takes both connections over. `forget` is called when they are closed."""
        self.scheme = scheme
        self.peer = peer
        self.dialed = dialed
        self._reactor = reactor
        self._forget = forget
        self._control = control
        self._data = data
        self._inbox = PayloadTable()  # used under the data connection's lock
        self._ending = CarrierEnd()
        self._receivers = (TlsReceiver(control, self._ending), TlsReceiver(data, self._ending, self._inbox))
        self._sink: Sink | None = None  # written by attach, like those of the receivers
        self._finish_told = False  # written by the driving thread
        self._delivering = RLock()

    # --- the verbs, for any thread

    def attach(self, sink: Sink) -> None:
        """See Carrier.attach."""
        first, self._sink = self._sink is None, sink
        for receiver in self._receivers:
            receiver.sink = sink
        if first:
            self._begin()

    def _begin(self) -> None:
        for receiver in self._receivers:
            receiver.connection.watch(partial(self._ready, receiver))
            self._look_again(receiver)
        if self._ending.is_broken:
            self._reactor.again(self._wind_up)

    def admit(self) -> None:
        """See Carrier.admit."""
        self._control.reader.decode = self._data.reader.decode = decode

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        """See Carrier.send_frame."""
        try:
            self._connection(lane).send(lane, b"".join((header, *body)) if body else header)
        except OSError as error:
            raise self._refusal(error) from error

    def queued_bytes(self, lane: Lane) -> int:
        """See Carrier.queued_bytes."""
        connection = self._connection(lane)
        with connection.lock:
            self._check()
            return connection.send_queue.queued_bytes(lane)

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """See Carrier.expect_payload. ValueError for memory or a number that cannot be used."""
        with self._data.lock:  # under which the inbox is cleared, after the end has been said
            self._check()
            self._inbox.expect(transfer, into.cast("B"))

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier.redirect_payload."""
        with self._data.lock:
            self._check()
            return self._inbox.redirect(transfer, None if into is None else into.cast("B"))

    def send_payload(self, transfer: int, data: memoryview) -> None:
        """See Carrier.send_payload."""
        try:
            self._data.send_payload(transfer, data.cast("B"))
        except OSError as error:
            raise self._refusal(error) from error

    def withdraw_payload(self, transfer: int) -> None:
        """See Carrier.withdraw_payload."""
        with self._data.lock:
            self._check()
            self._data.send_queue.withdraw(transfer)

    def finish(self) -> None:
        """See Carrier.finish."""
        self._check()
        try:
            self._control.finish(_FINISH_TIMEOUT)
            self._data.finish(_FINISH_TIMEOUT)
        except OSError as error:
            raise self._refusal(error) from error
        self._reactor.again(self._settle)

    def abort(self, reason: str) -> None:
        """See Carrier.abort."""
        self._close(self._ending.lose_silently(CarrierLost("closed", reason)))
        with self._delivering:
            self._let_go()

    def stats(self) -> dict[str, float]:
        """See Carrier.stats."""
        both = (self._control, self._data)
        return {
            "bytes_sent": sum(connection.bytes_sent for connection in both),
            "bytes_received": sum(connection.bytes_received for connection in both),
            "frames_sent": sum(connection.frames_sent for connection in both),
            "frames_received": sum(receiver.frames_received for receiver in self._receivers),
        }

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        self._control.abandon()
        self._data.abandon()

    def _connection(self, lane: int) -> TlsConnection:
        return self._control if lane <= _LAST_CONTROL_LANE else self._data

    def _check(self) -> None:
        """Raise if it has ended: for the reason that the sink was told, whichever connection was closed for another."""
        lost = self._ending.lost
        if lost is not None:  # a new object each time: one raised twice would carry the first one's frames along
            raise CarrierLost(lost.kind, lost.reason)

    def _refusal(self, error: OSError) -> CarrierLost:
        """What a verb raises that could not send."""
        if isinstance(error, CarrierLost):
            lost = self._ending.lost or error
            return CarrierLost(lost.kind, lost.reason)
        return self._break_off(error)

    def _break_off(self, error: OSError) -> CarrierLost:
        """A send has failed; the driving thread sees to the rest."""
        why, is_news = self._ending.break_off(carrier_lost_of(error))
        if is_news and self._sink is not None:
            self._reactor.again(self._wind_up)
        return why

    # --- the driving thread

    def _ready(self, receiver: TlsReceiver, events: int) -> bool:
        """The socket has news."""
        with self._delivering:
            try:
                return self._exchange(receiver, events)
            except BaseException as error:
                self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                raise

    def _exchange(self, receiver: TlsReceiver, events: int) -> bool:
        happened = bool(events & WRITABLE)
        if happened:
            self._pump(receiver.connection)
        if events & ~WRITABLE:
            happened |= receiver.receive(self)
            self._look_again(receiver)
        if receiver.peer_finished or self._ending.lost is not None:
            happened |= self._settle()
        return happened

    def fail(self, why: CarrierLost) -> None:
        """By the driving thread: it is lost, and the sink told if there is one."""
        self._ending.lose(why)
        self._settle()

    def _look_again(self, receiver: TlsReceiver) -> None:
        if receiver.holds_input:
            self._reactor.again(partial(self._ready, receiver, READABLE))

    def _pump(self, connection: TlsConnection) -> None:
        try:
            connection.pump()
        except OSError as error:
            self._break_off(error)

    def _wind_up(self) -> bool:
        """Nothing can be sent any more: take in what the peer sent before it went, then end."""
        with self._delivering:
            try:
                self._take_the_rest()
                return self._settle()
            except BaseException as error:
                self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                raise

    def _take_the_rest(self) -> None:
        for receiver in self._receivers:
            while receiver.receive(self):
                continue
        self._ending.lose()

    def _settle(self) -> bool:
        """See whether it is over, politely or not, and tell."""
        with self._delivering:
            if self._ending.lost is None and all(receiver.peer_finished for receiver in self._receivers):
                self._see_whether_both_finished()
            why = self._ending.take_news()
            if why is None:
                return False
            self._close(why)
            if self._sink is not None:
                self._sink.carrier_lost(self, why)
            self._let_go()
            return True

    def _see_whether_both_finished(self) -> None:
        # A payload that is not whole by now was taken back: it is dropped with the carrier and never reported.
        if not self._finish_told and self._sink is not None:
            self._finish_told = True
            self._tell_finished(self._sink)
        if self._control.close_notice_sent and self._data.close_notice_sent:
            self._close(self._ending.lose_silently(CarrierLost("closed", "both sides have finished")))
            self._let_go()

    def _tell_finished(self, sink: Sink) -> None:
        try:
            sink.carrier_finished(self)
        except BaseException as error:
            self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
            raise

    def _let_go(self) -> None:
        """It has ended, and its sink has heard all it was to hear. With `_delivering` held: no call is running, except
        one that this is called from.
        """
        if self._sink is not None:
            self.attach(SILENT_SINK)

    def _close(self, why: CarrierLost) -> None:
        self._control.close(why)
        self._data.close(why)
        with self._data.lock:
            self._inbox.clear()
        self._forget(self)
