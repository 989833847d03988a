"""What is sent or shared and is no struct of MessagePack or JSON: headers, numbers, memory layouts, digests.

The functions here call the code that writes the bytes, and read them back where something reads them. Numbers of
enumerations stand beside words that stay when a member gets another name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from enum import IntEnum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from nexar.arrays.compression.base import Compressor, Terms
from nexar.arrays.compression.codes import code_of_compressor
from nexar.arrays.compression.quantized import FP8, Int8, NoCompression
from nexar.arrays.compression.sparse import RandomK, TopK
from nexar.arrays.dtypes import RAW, dtype_of
from nexar.arrays.operators import ReduceCode
from nexar.cluster.decisions import completion
from nexar.collectives import shared_region_layout
from nexar.collectives.compressed import seed_of
from nexar.collectives.fingerprint import (
    ROOTS_CHOICE,
    Fingerprint,
    code_of_algorithm,
    counted,
    rooted,
)
from nexar.collectives.operations import AlgorithmCode, OperationCode
from nexar.communicator import (
    communicator,
    generation_builder,
    multipart,
    recovery_methods,
    serialization,
    state_transfer,
)
from nexar.communicator.serialization import decode_object, encode_object
from nexar.links import messages
from nexar.links.messages import collective_tag
from nexar.transport import quic
from nexar.transport.quic import protocol
from nexar.transport.shm import handshake, ring_frames
from nexar.transport.shm.ring import WITHDRAWN, SlotChunk
from nexar.transport.tls import handshake as tls_hello
from nexar.wire import frame, relay, rpc
from tests.architecture.golden.sample import NODE, OTHER_NODE, THIRD_NODE, Sample, text

NATIVE = "number of quic close code"
"""Keys that begin so are made only where the native package is installed."""


def format_samples() -> Iterator[Sample]:
    """All of them."""
    for samples in (
        _frame_headers, _shapes, _relayed_frames, _remote_calls, _numbers, _fingerprints, _settling_news, _parts,
        _objects, _digests, _shared_memory_handshake, _shared_memory_segment, _tls_hellos, _quic_preambles,
        _quic_close_codes, _records, _compressed_pieces,
    ):  # fmt: skip
        yield from samples()


# ---------------------------------------------------------------- frames

_KINDS = {
    "eager": frame.FrameKind.EAGER, "envelope": frame.FrameKind.ENVELOPE, "grant": frame.FrameKind.GRANT,
    "delivered": frame.FrameKind.DELIVERED, "refuse": frame.FrameKind.REFUSE, "withdraw": frame.FrameKind.WITHDRAW,
    "credit": frame.FrameKind.CREDIT, "control": frame.FrameKind.CONTROL, "chunk": frame.FrameKind.CHUNK,
    "finish": frame.FrameKind.FINISH, "hello": frame.FrameKind.HELLO, "terms": frame.FrameKind.TERMS,
    "fallback": frame.FrameKind.FALLBACK, "relay": frame.FrameKind.RELAY, "room": frame.FrameKind.RELAY_CREDIT,
}  # fmt: skip


def _frame_headers() -> Iterator[Sample]:
    """Every field of every kind; the fields that mean something in a kind are a subset of these."""
    for word, kind in _KINDS.items():
        shape = (2, 3) if kind in (frame.FrameKind.EAGER, frame.FrameKind.ENVELOPE) else ()
        header = _header(kind, dimensions=len(shape))
        data = frame.encode(header)
        assert frame.decode(data) == header
        yield Sample(f"frame header {word}", data)
    yield Sample("frame header, defaults", frame.encode(frame.Frame()))
    yield Sample("frame header of a control message to a stranger", frame.control_header(9))
    yield Sample("frame header of a piece of payload", frame.encode_chunk(0x0102030405060708, 0x1112131415161718, 77))
    yield Sample("frame header of a half-close", frame.encode_finish(0x0102030405060708))


def _header(kind: int, dimensions: int) -> frame.Frame:
    return frame.Frame(
        kind=kind,
        lane=2,
        carrier=3,
        space=4,
        dtype=5,
        dimensions=dimensions,
        operation=7,
        reduce_op=8,
        way=9,
        generation=0x0A0B0C0D,
        step=0x1A1B1C1D,
        root=0x2A2B2C2D,
        communicator=0x0102030405060708,
        source=NODE,
        destination=OTHER_NODE,
        tag=0x3132333435363738,
        sequence=0x4142434445464748,
        message=0x5152535455565758,
        transfer=0x6162636465666768,
        length=12,
        count=0x7172737475767778,
        body=8 * dimensions + 12,
    )


def _shapes() -> Iterator[Sample]:
    for shape in ((), (5,), (2, 3, 4)):
        data = frame.encode_shape(shape)
        assert frame.decode_shape(frame.Frame(dimensions=len(shape)), data) == shape
        yield Sample(f"shape {shape}", data)


_RELAY_KINDS = {
    "frame": relay.RelayKind.FRAME, "ack": relay.RelayKind.ACK, "probe": relay.RelayKind.PROBE,
    "broken": relay.RelayKind.BROKEN, "reset": relay.RelayKind.RESET,
}  # fmt: skip


def _relayed_frames() -> Iterator[Sample]:
    for word, kind in _RELAY_KINDS.items():
        header = relay.RelayHeader(
            kind=kind, hops=1, number=2, epoch=3, sequence=4, ack=5, route=(NODE, OTHER_NODE, THIRD_NODE)
        )
        body = bytearray(relay.encode_relay(header) + relay.encode_node(THIRD_NODE))
        found, carried = relay.decode_relay(body)
        assert found == header
        assert relay.decode_node(carried) == THIRD_NODE
        yield Sample(f"relayed {word}", bytes(body))
    relay.advance(body, 2)
    yield Sample("relayed reset, one hop on", bytes(body))


# ---------------------------------------------------------------- remote calls

_WHATS = {
    "call": rpc.BodyKind.CALL, "call by number": rpc.BodyKind.CALL_BY_NUMBER, "withdraw": rpc.BodyKind.WITHDRAW,
    "returned": rpc.BodyKind.RETURNED, "raised": rpc.BodyKind.RAISED, "unknown": rpc.BodyKind.UNKNOWN,
    "overloaded": rpc.BodyKind.OVERLOADED, "cancelled": rpc.BodyKind.CANCELLED, "expired": rpc.BodyKind.EXPIRED,
}  # fmt: skip


def _remote_calls() -> Iterator[Sample]:
    for word, what in _WHATS.items():
        body = rpc.Body(what, text="text", number=7, seconds=1.5, pickled=True, pieces=(memoryview(b"piece"),))
        yield _call(f"remote call body {word}", body)
    several = (memoryview(b"first"), memoryview(b"second"))
    yield _call("remote call body of several pieces", rpc.Body(rpc.BodyKind.RETURNED, pieces=several))
    yield _call("remote call body without pieces", rpc.Body(rpc.BodyKind.EXPIRED))
    yield Sample("remote call of a function by name", bytes(rpc.call("function", 2.5)))
    yield Sample("remote call of a function by number", bytes(rpc.call(3, 2.5)))


def _call(key: str, body: rpc.Body) -> Sample:
    row = rpc.encode(body)
    assert rpc.decode(row) == body
    return Sample(key, bytes(row))


# ---------------------------------------------------------------- numbers


def _numbers() -> Iterator[Sample]:
    """What each number means. Collectives, reductions and algorithms are known by the names that users write."""
    tables: dict[str, dict[str, Any]] = {
        "frame kind": _KINDS,
        "frame lane": {
            "control": frame.Lane.CONTROL, "rpc": frame.Lane.RPC, "data": frame.Lane.DATA, "bulk": frame.Lane.BULK,
            "relay": frame.Lane.RELAY,
        },
        "frame tag space": {
            "tagged": frame.Space.TAGGED, "untagged": frame.Space.UNTAGGED, "collective": frame.Space.COLLECTIVE,
            "part": frame.Space.PART, "call": frame.Space.CALL, "answer": frame.Space.ANSWER,
            "closed": frame.Space.CLOSED,
        },
        "relayed": _RELAY_KINDS,
        "remote call body": _WHATS,
        "tls connection": {"control": tls_hello.Half.CONTROL, "data": tls_hello.Half.DATA},
        "tls answer": {
            "welcome": tls_hello.HelloAnswer.WELCOME, "refused": tls_hello.HelloAnswer.REFUSED,
            "certificate refused": tls_hello.HelloAnswer.UNVERIFIED,
        },
        "quic stream": _STREAMS,
        "collective": {code.name.lower(): code for code in OperationCode},
        "reduction": {code.name.lower(): code for code in ReduceCode},
        "algorithm": {code.name.lower(): code for code in AlgorithmCode},
    }  # fmt: skip
    for what, table in tables.items():
        _check_complete(what, table)
        yield from (text(f"number of {what} {word}", str(int(code))) for word, code in table.items())
    yield from (text(f"number of dtype {dtype}", str(code)) for code in range(256) if (dtype := dtype_of(code)))
    others = {"bytes": RAW, "object": messages.OBJECT, "pickle": messages.PICKLE, "buffers": messages.BUFFERS}
    yield from (text(f"number of content {word}", str(code)) for word, code in others.items())

    kinds = {
        "integer": serialization.INTEGER,
        "complex": serialization.COMPLEX,
        "tuple": serialization.TUPLE,
        "set": serialization.SET,
        "frozenset": serialization.FROZENSET,
        "dict": serialization.PAIRS,
        "bytearray": serialization.BYTEARRAY,
        "array": serialization.ARRAY,
        "array apart": serialization.ARRAY_APART,
        "number of NumPy": serialization.NUMBER,
        "datetime": serialization.DATETIME,
        "date": serialization.DATE,
        "time": serialization.TIME,
        "timedelta": serialization.TIMEDELTA,
        "tensor": serialization.TENSOR,
        "list": serialization.LIST,
        "bytes": serialization.BYTES,
    }
    yield from (text(f"number of object type {word}", str(code)) for word, code in kinds.items())


def _check_complete(what: str, table: dict[str, IntEnum]) -> None:
    missing = set(type(next(iter(table.values())))) - set(table.values())
    assert not missing, f"tests.architecture.golden.formats has no word for {what} {sorted(missing)}: add one"


def _fingerprints() -> Iterator[Sample]:
    asked_for = code_of_algorithm("ring", forced=True, deterministic=True)
    fingerprint = Fingerprint(operation=2, dtype=3, count=4, root=5, reduce_op=6, algorithm_code=7)
    yield text("fingerprint of a call", str(tuple(fingerprint)))
    yield text("fingerprint, algorithm that was asked for", str(asked_for))
    yield text("fingerprint, algorithm of the root's choice", str(ROOTS_CHOICE))
    yield text("fingerprint, root", str(rooted(5)))
    yield text("fingerprint, digest of counts", str(counted([3, 0, 5])))
    yield text("tag of a step of a collective", hex(collective_tag(0x0102030405060708, 9)))
    for compressor in _COMPRESSORS.values():
        for feedback in (False, True):
            word = f"{compressor.name} {'with' if feedback else 'without'} residual"
            yield text(
                f"fingerprint, compressor {word}",
                str(code_of_compressor(compressor, feedback=feedback, piece_bytes=64)),
            )


# ---------------------------------------------------------------- communicators


class _Messages:
    """Two ranks of a group, of which the other one says what this one says."""

    rank, size, communicator = 0, 2, 5
    matching = SimpleNamespace(generation=3)

    def __init__(self) -> None:
        self.sent = b""
        self.about: Any = None
        self._receive = SimpleNamespace(into=b"")

    def post_receive(self, source: int, into: None, **_: Any) -> Any:
        return self._receive

    def post_send(self, dest: int, data: memoryview, deadline: float, *, about: Any) -> Any:
        self.sent, self.about, self._receive.into = bytes(data), about, bytes(data)

    def post_open(self, ranks: Any, deadline: float) -> Any:
        """All are linked."""


def _told(group: Any, mine: completion.CompletedCalls) -> int:
    """What the run returns, whose operations are done at once."""
    run = generation_builder.exchange_completed(group, mine, 0.0)
    try:
        while True:
            next(run)
    except StopIteration as stop:
        found: int = stop.value
        return found


def _settling_news() -> Iterator[Sample]:
    group: Any = _Messages()
    assert _told(group, completion.NEW_MEMBER) == completion.UNCONSTRAINED
    yield Sample("news of a settling generation, of a newcomer", group.sent)
    mine = completion.CompletedCalls(generation=6, number=7)
    assert _told(group, mine) == mine.number
    yield Sample("news of a settling generation", group.sent)
    yield text("news of a settling generation, space, sequence and step",
                f"{int(group.about.space)} {group.about.sequence:x} {group.about.step}")  # fmt: skip
    unknown = f"{completion.NONE_COMPLETED} {completion.UNCONSTRAINED}"
    yield text("news of a settling generation, no call and any call", unknown)


def _parts() -> Iterator[Sample]:
    pieces = (memoryview(b"first"), memoryview(b""), memoryview(b"third"))
    row = multipart.flatten(pieces)
    assert multipart.unflatten(row) == pieces
    # What is between the pieces is not read, and is whatever the memory held.
    shown = bytes(row[: 16 + 8 * len(pieces)]) + b"".join(pieces)
    starts = [_address(piece) - _address(row) for piece in multipart.unflatten(row) if piece]
    yield Sample("message in parts, all in one", shown)
    yield text("message in parts, all in one: where pieces begin, and the end", f"{starts} {len(row)}")
    table = multipart._head([70_000, 0, 5], 9)
    assert multipart.read_table(memoryview(table)) == multipart.PieceTable((70_000, 0, 5), 9, ())
    yield Sample("message in parts, sizes", table)


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


_LARGE = np.arange(1024, dtype=np.float32)
_OBJECTS: dict[str, Any] = {
    "None": None,
    "bool": True,
    "int": -5,
    "large int": 1 << 70,
    "negative large int": -(1 << 70),
    "float": 1.5,
    "complex": 1.5 - 2.5j,
    "str": "text ü",
    "bytes": b"bytes",
    "bytearray": bytearray(b"bytes"),
    "list": [1, "two", 3.0],
    "list of lists": [[1], [b"2", None]],
    "tuple": (1, (2, "three")),
    "dict": {"one": 1, 2: [3.0], (4, 5): None},
    "set": {7},
    "frozenset": frozenset({"seven"}),
    "datetime": datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC),
    "datetime without zone": datetime(2026, 3, 4, 5, 6, 7, fold=1),  # noqa: DTZ001 - they can be sent too
    "date": date(2026, 3, 4),
    "time": time(5, 6, 7, 89),
    "timedelta": timedelta(days=-1, seconds=2, microseconds=3),
    "number of NumPy": np.float32(1.5),
    "array": np.array([[1, 2], [3, 4]], dtype=np.int16),
    "array without dimensions": np.array(5, dtype=np.uint8),
    "large array": _LARGE,
    "large arrays in a dict": {"a": _LARGE, "b": [_LARGE[::2], _LARGE[:2]]},
}


def _objects() -> Iterator[Sample]:
    for word, value in _OBJECTS.items():
        encoded = encode_object(value)
        _check_equal(decode_object(encoded), value)
        yield Sample(f"object {word}", b"".join(part[:256] for part in encoded))
        yield text(f"object {word}, sizes of parts", str([len(part) for part in encoded]))
    assert decode_object(encode_object(None, pickle=True), pickle=True) is None
    yield Sample("object pickled", b"".join(encode_object(None, pickle=True)))
    agreed = msgspec.msgpack.encode([bytes(part) for part in encode_object({"a": 1})])
    assert recovery_methods._read(agreed, "agree #1") == {"a": 1}
    yield Sample("agreed value", agreed, "msgpack")


def _check_equal(found: Any, value: Any) -> None:
    """Also of the same type, arrays within too."""
    assert type(found) is type(value)
    if isinstance(value, dict):
        for key in value:
            _check_equal(found[key], value[key])
    elif isinstance(value, list):
        for each, other in zip(found, value, strict=True):
            _check_equal(each, other)
    elif isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)
    else:
        assert found == value


def _digests() -> Iterator[Sample]:
    """Ranks compute these numbers alone and must come to the same."""
    group: Any = _Messages()
    ids = [communicator.subgroup_id(group, way, 2, (0, 3)) for way in (communicator._SPLIT, communicator._GROUP)]
    yield text("id of a communicator from split", str(ids[0]))
    yield text("id of a communicator from group", str(ids[1]))
    yield text("id of the communicator that carries state to a joiner", str(state_transfer._id_of(NODE, OTHER_NODE)))
    yield text("checksum of state", str(state_transfer.checksum([memoryview(b"first"), memoryview(b"second")])))
    yield text("seed of a compressed call", str(seed_of(5, 6, 7)))


# ---------------------------------------------------------------- transports


def _shared_memory_handshake() -> Iterator[Sample]:
    draws = iter((bytes(range(32)), bytes(range(32, 64))))
    secret, in_memory = b"secret", bytes(range(64, 96))
    with patch("secrets.token_bytes", lambda _: next(draws)):
        key = handshake.derive_key(secret, NODE)
        dialer = handshake.DialerSide.start(key, NODE, OTHER_NODE)
        listener = handshake.ListenerSide.start(secret, OTHER_NODE, dialer.hello)
    challenge = listener.challenge()
    offer = dialer.offer(challenge, in_memory)
    assert listener.accept_offer(offer) == in_memory
    yield Sample("shared memory handshake key", key)
    yield Sample("shared memory handshake hello", dialer.hello)
    yield Sample("shared memory handshake challenge", challenge)
    yield Sample("shared memory handshake offer", offer)


def _shared_memory_segment() -> Iterator[Sample]:
    """Both sides write a frame and a chunk: geometry, nonces, counters, records, descriptors and slots."""
    dialer, descriptor = ring_frames.create_segment(
        ring_frames.SegmentGeometry(ring_bytes=1 << 14, chunk_bytes=4096, slots=2)
    )
    try:
        listener = ring_frames.attach_segment(descriptor)
        for side, byte in ((dialer, b"\x11"), (listener, b"\x22")):
            side.write_nonce(byte * ring_frames.NONCE_BYTES)
            assert side.writer.write(byte * 3, (byte * 2,), 5, 1 << 32 | 2 << 40)
            side.slot_writer.write(SlotChunk(transfer=7, offset=8, length=4, total=9), memoryview(byte * 4))
            side.slot_writer.write(SlotChunk(transfer=7, offset=8, length=0, total=WITHDRAWN), memoryview(b""))
            side.words[ring_frames.sleep_word(side.side)] = 0x55
        content = os.pread(descriptor, 1 << 20, 0)
        listener.release()
    finally:
        dialer.release()
        os.close(descriptor)
    yield text("shared memory segment", "\n".join([f"{len(content)} bytes", *_written(content)]))


def _written(content: bytes) -> Iterator[str]:
    """Each row of 32 bytes that is not all zeros, with its offset."""
    for at in range(0, len(content), 32):
        if any(content[at : at + 32]):
            yield f"{at:6} {content[at : at + 32].hex()}"


def _tls_hellos() -> Iterator[Sample]:
    for word, half in (("control", tls_hello.Half.CONTROL), ("data", tls_hello.Half.DATA)):
        for verdict in tls_hello.HelloAnswer:
            hello = tls_hello.ConnectionHello(half, bytes(range(16)), half == tls_hello.Half.DATA, verdict, "reason")
            data = tls_hello.encode_connection_hello(hello)
            header = frame.decode(data)
            assert tls_hello.decode_connection_hello(header, data[frame.HEADER_BYTES :]) == hello
            yield Sample(f"tls hello {word} {int(verdict)}", data)


_STREAMS = {
    "ordered": protocol.StreamType.ORDERED, "payload": protocol.StreamType.PAYLOAD,
    "farewell": protocol.StreamType.ALL_RECEIVED,
}  # fmt: skip


def _quic_preambles() -> Iterator[Sample]:
    for word, stream in _STREAMS.items():
        data = protocol.encode_preamble(stream, 0x0102030405060708, lane=2, size=0x1112131415161718)
        assert protocol.decode_preamble(data) == (stream, 2, 0x0102030405060708, 0x1112131415161718)
        yield Sample(f"quic preamble {word}", data)


def _quic_close_codes() -> Iterator[Sample]:
    """Only where the native package is installed: see NATIVE."""
    if quic.missing_support() is not None:
        return
    from nexar.transport.quic.protocol import CloseCode

    codes = {
        "done": CloseCode.DONE, "aborted": CloseCode.ABORTED, "misbehaved": CloseCode.MISBEHAVED,
        "refused": CloseCode.REFUSED, "fault": CloseCode.FAULT,
    }  # fmt: skip
    _check_complete(NATIVE, codes)
    yield from (text(f"{NATIVE} {word}", str(int(code))) for word, code in codes.items())


# ---------------------------------------------------------------- collectives


def _records() -> Iterator[Sample]:
    """The record of rank 1 of two, after it has done everything that is written there. The time is blanked."""
    memory = bytearray(2 * shared_region_layout.RECORD_BYTES)
    records = shared_region_layout.RegionRecords(memoryview(memory), 1, 2)
    fingerprint = Fingerprint(operation=2, dtype=3, count=4, root=5, reduce_op=6, algorithm_code=7)
    records.words[records.mine] = 0x11
    records.mark_aborted(0x21)
    records.mark_aborted(0x22)
    records.take(4, fingerprint)
    records.take(5, fingerprint._replace(count=9))
    records.announce(10, fingerprint)
    announced = records.announced(records.mine, 10)
    assert announced is not None
    assert announced[0] == fingerprint
    assert records.taken(records.mine, 4) == fingerprint
    assert records.has_aborted(records.mine, 0x21)
    content = bytes(memory).replace(announced[1].to_bytes(8, sys.byteorder), b"\xff" * 8)
    records.release()
    yield text("shared region records", "\n".join([f"{len(content)} bytes", *_written(content)]))


_COMPRESSORS: dict[str, Compressor] = {
    "none": NoCompression(), "top k": TopK(0.25), "random k": RandomK(0.25), "fp8 e4m3": FP8("e4m3", 4),
    "fp8 e5m2": FP8("e5m2", 4), "int8": Int8(4),
}  # fmt: skip


def _compressed_pieces() -> Iterator[Sample]:
    array = np.array([0, 1, -2, 4, 8, -16, 32, 64, -127, 3], dtype=np.float32)
    for word, compressor in _COMPRESSORS.items():
        terms = Terms(len(array), array.dtype, seed=7, feedback=False)
        piece = compressor.compress(array, terms)
        assert len(piece) == compressor.size_bytes(len(array), array.dtype)
        yield Sample(f"compressed piece {word}", bytes(piece))
