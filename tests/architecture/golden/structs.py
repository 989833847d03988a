"""Every struct that is sent or stored, its golden key, and the functions that write and read it.

Keys are part of the golden file: they are tags of the wire format, or words for what the struct is. They stay when a
class, an attribute or a module gets another name.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from nexar.cli.doctor import observations, questions
from nexar.cluster import membership
from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.resize import Wish, decode_wish, encode_wish
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.membership import Membership
from nexar.cluster.seed_state import _Stored
from nexar.collectives import dump, stacks, trace_part
from nexar.launch import exit_report, rendezvous_messages, seed_terms
from nexar.launch.handover import _Note
from nexar.wire import bulletin, frame, joining, messages
from nexar.wire.handshake import Hello, decode_hello, encode_hello
from tests.architecture.golden.filling import Filler
from tests.architecture.sources import PACKAGE, files, module_name

_OPTIONAL = {"torch", "nexar_quic"}
"""Packages that need not be installed: a module that needs one defines no struct."""


@dataclass(frozen=True)
class Codec:
    """How a struct becomes bytes, and how bytes become the struct."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    form: str = "msgpack"
    """What the bytes are, so that a difference can be shown in words."""


@dataclass(frozen=True)
class StructSample:
    """A value of a struct, and its bytes."""

    key: str
    value: Any
    codec: Codec

    @property
    def data(self) -> bytes:
        """What is sent or stored."""
        return self.codec.encode(self.value)


def _msgpack(kind: type) -> Codec:
    """Of a struct that is sent inside another one."""
    return Codec(msgspec.msgpack.encode, lambda data: msgspec.msgpack.decode(data, type=kind))


def _json(kind: Any) -> Codec:
    return Codec(msgspec.json.encode, lambda data: msgspec.json.decode(data, type=kind), "json")


def _decode_join(data: bytes) -> Any:
    return joining.decode_join(data, joining.MAX_JOIN_BYTES)


def _encode_membership(parts: Any) -> bytes:
    return Membership(*(getattr(parts, name) for name in parts.__struct_fields__)).encode()


def _decode_membership(data: bytes) -> Any:
    found = Membership.decode(data)
    kind = membership._Encoded
    return kind(*(getattr(found, field.name) for field in fields(found)[: len(kind.__struct_fields__)]))


def _posted(kind: Any) -> Codec:
    return Codec(
        lambda value: rendezvous_messages.encoded(value).encode(),
        lambda data: rendezvous_messages.decoded(data.decode(), kind),
        "json",
    )


_CONTROL = Codec(messages.encode, messages.decode)
_JOIN = Codec(joining.encode_join, _decode_join, "prefixed msgpack")
_DOCTOR = Codec(questions.encode, questions.decode)
_SEED_ANSWER = _json(seed_terms.SeedReady | seed_terms.SeedFailed)

_NAMED: dict[str, tuple[type, Codec]] = {
    "hello": (Hello, Codec(encode_hello, decode_hello, "prefixed msgpack")),
    "control message culprit": (messages.Culprit, _msgpack(messages.Culprit)),
    "control message doing": (messages.Doing, _msgpack(messages.Doing)),
    "control message ballot number": (messages.Number, _msgpack(messages.Number)),
    "control message of unknown type": (messages.Unknown, _msgpack(messages.Unknown)),
    "status bulletin": (bulletin.Bulletin, Codec(bulletin.encode_bulletin, bulletin.decode_bulletin)),
    "status bulletin traffic": (bulletin.Traffic, _msgpack(bulletin.Traffic)),
    "status bulletin late": (bulletin.Late, _msgpack(bulletin.Late)),
    "status board": (bulletin.Board, _msgpack(bulletin.Board)),
    "status board row": (bulletin.Row, _msgpack(bulletin.Row)),
    "membership": (membership._Encoded, Codec(_encode_membership, _decode_membership)),
    "membership member": (membership.Member, Codec(membership.encode_member, membership.decode_member)),
    "membership attendant": (membership.Attendant, _msgpack(membership.Attendant)),
    "membership change": (Change, Codec(Change.encode, Change.decode)),
    "membership change departure": (Departure, _msgpack(Departure)),
    "vote": (Vote, Codec(Vote.encode, Vote.decode)),
    "checkpoint wish": (Wish, Codec(encode_wish, decode_wish)),
    "seed state identity": (_Stored, _msgpack(_Stored)),
    "ticket file": (_Note, _json(_Note)),
    "seed process terms": (seed_terms.SeedTerms, _json(seed_terms.SeedTerms)),
    "seed process ready": (seed_terms.SeedReady, _SEED_ANSWER),
    "seed process failed": (seed_terms.SeedFailed, _SEED_ANSWER),
    "exit report of a rank": (exit_report.ExitReport, _json(exit_report.ExitReport)),
    "torch rendezvous round": (rendezvous_messages.Round, _posted(rendezvous_messages.Round)),
    "torch rendezvous hello": (rendezvous_messages.Hello, _posted(rendezvous_messages.Hello)),
    "torch rendezvous answer": (rendezvous_messages.Answer, _posted(rendezvous_messages.Answer)),
    "dump": (dump.Dump, Codec(dump.encode, dump.decode, "json")),
    "dump call": (dump.Called, _json(dump.Called)),
    "dump peer": (dump.Peer, _json(dump.Peer)),
    "dump communicator": (dump.Seat, _json(dump.Seat)),
    "dump thread": (stacks.Stack, _json(stacks.Stack)),
    "trace part": (trace_part.Part, Codec(trace_part._encoder.encode, trace_part.decode_part)),
    "doctor version": (observations.Version, _json(observations.Version)),
    "doctor interface": (observations.Attachment, _json(observations.Attachment)),
    "doctor round trip": (observations.Trip, _json(observations.Trip)),
    "doctor listening": (observations.Door, _json(observations.Door)),
    "doctor memory": (observations.Room, _json(observations.Room)),
    "doctor limits": (observations.Limits, _json(observations.Limits)),
    "doctor machine": (observations.Machine, _json(observations.Machine)),
    "doctor reach": (observations.Reach, _json(observations.Reach)),
    "doctor report": (observations.Report, _json(observations.Report)),
    "doctor finding": (observations.Finding, _json(observations.Finding)),
    **{f"doctor message {kind.__struct_config__.tag}": (kind, _DOCTOR)
       for kind in (questions.Ask, questions.Answer, questions.Hand, questions.Conclude)},
    **{f"control message {kind.__struct_config__.tag}": (kind, _CONTROL) for kind in messages.KNOWN},
    **{f"join message {kind.__struct_config__.tag}": (kind, _JOIN) for kind in joining.KNOWN_JOIN},
}  # fmt: skip
_BY_HAND: dict[str, type] = {"frame header": frame.Frame}
"""Structs whose samples are in formats.py: their fields have widths that their types do not tell."""

KEYS: dict[type, str] = {kind: key for key, (kind, _) in _NAMED.items()} | {kind: key for key, kind in _BY_HAND.items()}
"""The golden key of each struct; longer keys begin with it."""


def struct_samples() -> Iterator[StructSample]:
    """Of every struct: with all fields filled, with defaults only, and with each value of fields that have few."""
    filler = Filler(KEYS)
    for key, (kind, codec) in _NAMED.items():
        full, least = filler.full(kind), filler.least(kind)
        yield StructSample(key, full, codec)
        if least != full:
            yield StructSample(f"{key}, defaults", least, codec)
        for words, value in filler.variants(kind):
            yield StructSample(f"{key}, {words}", value, codec)


def structs_of_the_package() -> list[type]:
    """All structs that modules of nexar define, but for its test tools and for those that only others extend."""
    texts = {path: path.read_text("utf-8") for path in files(".py", below=PACKAGE) if "testing" not in path.parts}
    _load(path for path, text in texts.items() if "msgspec" in text)
    extends_one = re.compile(
        rf"^class \w+\([^)]*\b(?:{'|'.join({kind.__name__ for kind in _structs()})})\b", re.MULTILINE
    )
    _load(path for path, text in texts.items() if extends_one.search(text))
    sent = [kind for kind in _structs() if kind.__struct_fields__ or not kind.__subclasses__()]
    return sorted(sent, key=lambda kind: (kind.__module__, kind.__qualname__))


def _load(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            importlib.import_module(module_name(path))
        except ModuleNotFoundError as error:
            if error.name not in _OPTIONAL:
                raise


def _structs() -> set[type]:
    ours = {kind for kind in _below(msgspec.Struct) if kind.__module__.startswith("nexar.")}
    return {kind for kind in ours if not kind.__module__.startswith("nexar.testing")}


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
