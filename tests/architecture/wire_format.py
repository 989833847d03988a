"""Generates the wire format page: layouts, numbers and messages of `nexar.wire`."""

import ast
import inspect
import re
import struct
import sys
import textwrap
from collections.abc import Iterable, Iterator
from enum import IntEnum

from nexar.wire import control, frame, hello, join, relay, rpc
from tests.architecture.docstrings import fields_of, text_of

_INTRODUCTION = f"""The bytes that two processes exchange. They travel in TLS 1.3, over QUIC or TCP, except in the
memory of one host, and except payloads if `NEXAR_ENCRYPT_BULK_TRANSPORT=false` (see the
[security model](../explain/security-model.md)). The source is `src/nexar/wire`: pure functions, tested with hostile
input. Numbers are little-endian. The frame version is {frame.VERSION}, the protocol version is
{hello.PROTOCOL_VERSION}; nodes of different versions raise `VersionMismatch`."""
_FRAMES = f"""## Frames

A frame is a header of {frame.HEADER_BYTES} bytes and exactly `body` bytes after it, at most {frame.MAX_BODY_BYTES:,}.
So a reader finds the next frame without understanding this one: it skips and counts a frame of unknown kind, and
rejects an oversized one before it allocates memory."""
_MEANINGS = {
    "version": "version of the header",
    "kind": "see [kinds](#framekind)",
    "lane": "traffic class, see [lanes](#lane)",
    "carrier": "the connection of the link that carries the payload",
    "space": "tag namespace, see [spaces](#space)",
    "dtype": "of the array: a number of `arrays/dtypes.py`; 0: untyped bytes",
    "dimensions": f"number of dimensions of the shape, at most {frame.MAX_DIMENSIONS}",
    "operation": "collective: the operation",
    "reduce_op": "collective: the reduction",
    "way": "collective: the algorithm, + 64 if the caller chose it, + 128 if deterministic; 0: not stated",
    "generation": "of the communicator; frames of an older one are dropped",
    "step": "collective: step of the schedule",
    "root": "collective: the root's rank + 1; 0: no root",
    "communicator": "id of the communicator; 0 is the world",
    "source": "node id of the sender",
    "destination": "node id of the receiver",
    "tag": "tag of the message",
    "sequence": "collective: its sequence number in the communicator",
    "message": "number of the message on this link and communicator; defines the order",
    "transfer": "number of the payload that follows separately",
    "length": "bytes of the message's array",
    "count": "collective: number of elements; chunk: its offset",
    "body": "bytes that follow this header",
}
_SHAPE = """The body of a message begins with its shape, 8 bytes for each dimension. The array follows if the message is
sent whole; otherwise its `length` bytes follow as a payload after the receiver's grant. `operation`, `dtype`, `count`,
`root`, `reduce_op` and `way` are the fingerprint of a collective: each rank compares it with its own call."""
_CONTROL = f"""## Control messages

The bodies of CONTROL frames between members: MessagePack maps with the heading below as `type`, at most
{control.MAX_MESSAGE_BYTES:,} bytes. A node drops and counts an unknown type, and ignores unknown fields; fields with
their default value are omitted."""
_JOINING = f"""## Join messages

Messages between a seed and a joiner, launcher or observer, in the bodies of CONTROL frames. Each begins with two bytes,
`nx`, and two bytes of protocol version, so every version understands a refusal. MessagePack follows: at most
{join.MAX_UNVERIFIED_BYTES:,} bytes from an unauthenticated peer, {join.MAX_JOIN_BYTES:,} from an authenticated one."""
_HELLO = "### The hello\n\nThe first message of each side, an array:"
_CALLS = f"""## Remote calls

Messages of the spaces CALL and ANSWER. A body is a head of {rpc._HEAD.size} bytes, the sizes of its pieces, a text (the
function's name, or an error) and the pieces, which are encoded values; in all at most {rpc.MAX_BODY_BYTES:,} bytes."""

_RELAYED = f"""## Relayed frames

The body of a RELAY frame, which other nodes forward: this header, the route with 8 bytes for each node, and the carried
bytes. The route names nodes, never ranks: both ends, and no node twice; at most {relay.MAX_HOPS:,} hops."""
_RELAY_MEANINGS = {
    "kind": "content, see [below](#relaykind)",
    "hops": "hops travelled when it arrives",
    "nodes": "number of nodes in the route",
    "number": "number of the link between the two ends",
    "epoch": "epoch of the source's membership",
    "sequence": "number of the frame on that link",
    "ack": "the source has received every frame below this number",
}


def wire_format(made: str) -> str:
    """Return the page. `made` says how it is generated."""
    parts = ["# Wire format", made, _INTRODUCTION, _FRAMES, _header(), _SHAPE]
    parts += [_numbers(kind) for kind in (frame.FrameKind, frame.Lane, frame.Space)]
    parts += [_CONTROL, *map(_message, control.KNOWN)]
    parts += [_JOINING, f"```text\n{_picture(join.__doc__)}\n```", _HELLO, _fields(hello.Hello)]
    parts += map(_message, join.KNOWN_JOIN)
    parts += [_CALLS, _numbers(rpc.BodyKind)]
    parts += [_RELAYED, _layout(relay._LAYOUT, _RELAY_MEANINGS), _numbers(relay.RelayKind)]
    return "\n\n".join(parts) + "\n"


def _header() -> str:
    names = frame.Frame.__struct_fields__
    assert set(names) == set(_MEANINGS), "say what each field of the header is for"
    return _layout(frame._LAYOUT, {name: _MEANINGS[name] for name in names})


def _layout(layout: struct.Struct, meanings: dict[str, str]) -> str:
    rows = [
        f"| {at} | {size} | `{name}` | {meaning} |"
        for (at, size), (name, meaning) in zip(_places(layout), meanings.items(), strict=True)
    ]
    return "\n".join(["| Offset | Bytes | Field | Meaning |", "|---|---|---|---|", *rows])


def _places(layout: struct.Struct) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each field, without padding."""
    at = 0
    for count, code in re.findall(r"(\d*)([A-Za-z])", layout.format):
        size = struct.calcsize(f"<{code}")
        for _ in range(int(count or 1)):
            if code != "x":
                yield at, size
            at += size
    assert at == layout.size


def _numbers(kind: type[IntEnum]) -> str:
    """Return a table of an enumeration; the comment after each number is its description."""
    said = dict(re.findall(r"^    (\w+) = \d+(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE))
    rows = [f"| {each.value} | {each.name} | {said[each.name].replace('|', chr(92) + '|')} |" for each in kind]
    return "\n".join([f"### {kind.__name__}", "", text_of(kind.__doc__), "", "| | | |", "|---|---|---|", *rows])


def _message(kind: type) -> str:
    described = f"### {kind.__struct_config__.tag}\n\n`{kind.__name__}`: {text_of(kind.__doc__)}"  # type: ignore[attr-defined]
    fields = _fields(kind)
    return f"{described}\n\n{fields}" if fields else described


def _fields(kind: type) -> str:
    """Return the fields with their types. Private aliases, which add bounds, are replaced by the plain type."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    types = {ast.unparse(each.target): each for each in found.body if isinstance(each, ast.AnnAssign)}
    bounds = vars(sys.modules[kind.__module__])
    return "\n".join(_field(name, types[name], text, bounds) for name, text in fields_of(found.body))


def _field(name: str, found: ast.AnnAssign, text: str, bounds: dict[str, object]) -> str:
    kind = re.sub(r"\b_[A-Z]\w+", lambda match: _plain(bounds.get(match[0])), ast.unparse(found.annotation))
    kind = re.sub(r"Annotated\[(.*), Meta\(.*\)\]", r"\1", kind)
    default = f" = {ast.unparse(found.value)}" if found.value else ""
    return f"- `{name}: {kind}{default}`" + (f": {text}" if text else "")


def _plain(alias: object) -> str:
    """Return the type behind a private alias."""
    origin = getattr(alias, "__origin__", alias)
    return getattr(origin, "__name__", str(origin))


def _picture(doc: str | None) -> str:
    """Return the diagram in a module docstring."""
    lines = inspect.cleandoc(doc or "").splitlines()
    drawn: Iterable[str] = (line for line in lines if line.startswith("    "))
    return textwrap.dedent("\n".join(drawn))
