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

from nexar.cli.doctor import observations
from nexar.cluster import membership
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.resize import ResizeRequest, decode_resize_request, encode_resize_request
from nexar.cluster.membership import Change, Departure, Membership, decode_membership, encode_membership
from nexar.cluster.seed_state import _Stored
from nexar.collectives import flight_recorder, trace_writer
from nexar.launch import exit_report, rendezvous, seed_process
from nexar.launch.seed_process import _TicketFile
from nexar.wire import control, frame, join, status
from nexar.wire.hello import Hello, decode_hello, encode_hello
from tests.architecture.golden.filling import Filler
from tests.architecture.sources import PACKAGE, files, module_name

_OPTIONAL = {"torch", "nexar_native"}
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
    return join.decode_join(data, join.MAX_JOIN_BYTES)


def _encode_membership(parts: Any) -> bytes:
    return encode_membership(Membership(*(getattr(parts, name) for name in parts.__struct_fields__)))


def _decode_membership(data: bytes) -> Any:
    found = decode_membership(data)
    kind = membership._Encoded
    return kind(*(getattr(found, field.name) for field in fields(found)[: len(kind.__struct_fields__)]))


def _posted(kind: Any) -> Codec:
    return Codec(
        lambda value: rendezvous.encoded(value).encode(),
        lambda data: rendezvous.decoded(data.decode(), kind),
        "json",
    )


_CONTROL = Codec(control.encode, control.decode)
_JOIN = Codec(join.encode_join, _decode_join, "prefixed msgpack")
_DOCTOR = Codec(observations.encode_probe, observations.decode_probe)
_SEED_ANSWER = _json(seed_process.SeedReady | seed_process.SeedFailed)

_NAMED: dict[str, tuple[type, Codec]] = {
    "hello": (Hello, Codec(encode_hello, decode_hello, "prefixed msgpack")),
    "control message culprit": (control.Blamed, _msgpack(control.Blamed)),
    "control message doing": (control.CurrentCall, _msgpack(control.CurrentCall)),
    "control message ballot number": (control.BallotNumber, _msgpack(control.BallotNumber)),
    "control message of unknown type": (control.Unknown, _msgpack(control.Unknown)),
    "status bulletin": (status.StatusReport, Codec(status.encode_status_report, status.decode_status_report)),
    "status bulletin traffic": (status.PeerTraffic, _msgpack(status.PeerTraffic)),
    "status bulletin late": (status.LateRank, _msgpack(status.LateRank)),
    "status board": (status.StatusPage, _msgpack(status.StatusPage)),
    "status board row": (status.StatusRow, _msgpack(status.StatusRow)),
    "membership": (membership._Encoded, Codec(_encode_membership, _decode_membership)),
    "membership member": (membership.Member, Codec(membership.encode_member, membership.decode_member)),
    "membership attendant": (membership.PinnedNode, _msgpack(membership.PinnedNode)),
    "membership change": (Change, Codec(Change.encode, Change.decode)),
    "membership change departure": (Departure, _msgpack(Departure)),
    "vote": (Vote, Codec(Vote.encode, Vote.decode)),
    "checkpoint wish": (ResizeRequest, Codec(encode_resize_request, decode_resize_request)),
    "seed state identity": (_Stored, _msgpack(_Stored)),
    "ticket file": (_TicketFile, _json(_TicketFile)),
    "seed process terms": (seed_process.SeedTerms, _json(seed_process.SeedTerms)),
    "seed process ready": (seed_process.SeedReady, _SEED_ANSWER),
    "seed process failed": (seed_process.SeedFailed, _SEED_ANSWER),
    "exit report of a rank": (exit_report.ExitReport, _json(exit_report.ExitReport)),
    "torch rendezvous round": (rendezvous.RendezvousRound, _posted(rendezvous.RendezvousRound)),
    "torch rendezvous hello": (rendezvous.RendezvousHello, _posted(rendezvous.RendezvousHello)),
    "torch rendezvous answer": (rendezvous.RendezvousAnswer, _posted(rendezvous.RendezvousAnswer)),
    "dump": (flight_recorder.Dump, Codec(flight_recorder.encode_dump, flight_recorder.decode_dump, "json")),
    "dump call": (flight_recorder.RecordedCall, _json(flight_recorder.RecordedCall)),
    "dump peer": (flight_recorder.DumpedPeer, _json(flight_recorder.DumpedPeer)),
    "dump communicator": (flight_recorder.DumpedCommunicator, _json(flight_recorder.DumpedCommunicator)),
    "dump thread": (flight_recorder.ThreadStack, _json(flight_recorder.ThreadStack)),
    "trace part": (trace_writer.TracePart, Codec(trace_writer._encoder.encode, trace_writer.decode_trace_part)),
    "doctor version": (observations.Version, _json(observations.Version)),
    "doctor interface": (observations.Attachment, _json(observations.Attachment)),
    "doctor round trip": (observations.RoundTrip, _json(observations.RoundTrip)),
    "doctor listening": (observations.ListenPort, _json(observations.ListenPort)),
    "doctor memory": (observations.FreeSpace, _json(observations.FreeSpace)),
    "doctor limits": (observations.Limits, _json(observations.Limits)),
    "doctor machine": (observations.Machine, _json(observations.Machine)),
    "doctor reach": (observations.Reach, _json(observations.Reach)),
    "doctor report": (observations.DoctorReport, _json(observations.DoctorReport)),
    "doctor finding": (observations.DoctorFinding, _json(observations.DoctorFinding)),
    **{f"doctor message {kind.__struct_config__.tag}": (kind, _DOCTOR)
       for kind in (
           observations.ProbeRequest, observations.ProbeReply, observations.ReportMessage,
           observations.ConclusionMessage
       )},
    **{f"control message {kind.__struct_config__.tag}": (kind, _CONTROL) for kind in control.KNOWN},
    **{f"join message {kind.__struct_config__.tag}": (kind, _JOIN) for kind in join.KNOWN_JOIN},
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


_NEVER_ENCODED = (
    "nexar.testing",
    # Events and actions of state machines.
    "nexar.cluster.decisions.admission_events",
    "nexar.cluster.decisions.agreement_instances",
    "nexar.cluster.decisions.membership_events",
    "nexar.cluster.decisions.successor_events",
)


def _structs() -> set[type]:
    ours = {kind for kind in _below(msgspec.Struct) if kind.__module__.startswith("nexar.")}
    return {kind for kind in ours if not kind.__module__.startswith(_NEVER_ENCODED)}


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
