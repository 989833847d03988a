"""The page of the wire format: layouts, numbers and messages as they stand in `nexar.wire`."""

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

_INTRODUCTION = f"""What travels between two processes: in TLS 1.3, whether over QUIC or TCP, except where it stays in
the memory of one host or `NEXAR_ENCRYPT_BULK_TRANSPORT=false` lets payloads travel open (see the
[security model](../explain/security-model.md)). The source is `src/nexar/wire`: pure functions between bytes and
meaning, which tests feed with hostile input. Numbers are little-endian. Frames have version {frame.VERSION}, the
protocol has version {hello.PROTOCOL_VERSION}; who meets another one is told so (`VersionMismatch`)."""
_FRAMES = f"""## Frames

A frame is a header of {frame.HEADER_BYTES} bytes and exactly `body` bytes after it, at most {frame.MAX_BODY_BYTES:,}.
So a reader finds the next frame without knowing what this one means: one of an unknown kind is skipped and counted, and
one that claims too much is refused before memory is committed to it."""
_MEANINGS = {
    "version": "of the header",
    "kind": "what the frame is, see [kinds](#kind)",
    "lane": "kind of traffic, see [lanes](#lane)",
    "carrier": "which of a link's connections is to carry the payload",
    "space": "whose tags, see [spaces](#space)",
    "dtype": "of the array: a number of `arrays/dtypes.py`; 0: bytes without a type",
    "dimensions": f"how many extents the shape has, at most {frame.MAX_DIMENSIONS}",
    "operation": "of a collective: which verb",
    "reduce_op": "of a collective: which operation reduces",
    "way": "of a collective: which algorithm, + 64 if it was asked for, + 128 if deterministic; 0: not stated",
    "generation": "of the communicator: frames of an older one are dropped",
    "step": "of a collective's schedule",
    "root": "of a collective: the root's rank + 1; 0: there is none",
    "communicator": "its id; 0 is the world",
    "source": "node id of who sends",
    "destination": "node id of who is to receive",
    "tag": "the conversation",
    "sequence": "of a collective: its number in the communicator",
    "message": "number of the message on this link and communicator: gives the order",
    "transfer": "number of the payload that follows apart",
    "length": "bytes of the message's array",
    "count": "of a collective: elements; of a chunk: where it starts",
    "body": "bytes that follow this header",
}
_SHAPE = """The body of a message begins with its shape, 8 bytes for each extent. Of a message that travels whole, the
array follows; of a large one, `length` bytes come as a payload once the receiver has granted it. `operation`, `dtype`,
`count`, `root`, `reduce_op` and `way` are a collective's fingerprint: each rank compares it with its own call."""
_CONTROL = f"""## Control messages

The bodies of CONTROL frames between members: MessagePack maps with the name below as `type`, at most
{control.MAX_MESSAGE_BYTES:,} bytes. A node drops and counts a name that it does not know, and ignores fields that it
does not know; fields that have their default are left out."""
_JOINING = f"""## Join messages

What is said between a seed and who wants to come in, in the bodies of CONTROL frames. Each begins with two bytes, `nx`,
and two of the protocol's version: so a refusal is understood by every version. What follows is MessagePack, at most
{join.MAX_UNVERIFIED_BYTES:,} bytes from a stranger and {join.MAX_JOIN_BYTES:,} from who has proven itself."""
_HELLO = "### The hello\n\nThe first word of who dials, an array:"
_CALLS = f"""## Remote calls

Messages of the spaces CALL and ANSWER. A body has a head of {rpc._HEAD.size} bytes, the sizes of its pieces, a text
(a function's name, or what went wrong), and the pieces, which are encoded values; in all at most
{rpc.MAX_BODY_BYTES:,} bytes."""

_RELAYED = f"""## Relayed frames

The body of a RELAY frame, on its way over other nodes: this header, the route as 8 bytes for each node, and what is
carried. The route names nodes, never ranks, both ends included and none twice; at most {relay.MOST_HOPS:,} hops."""
_RELAY_MEANINGS = {
    "kind": "what is carried, see [below](#relaykind)",
    "hops": "how many it has travelled when it arrives",
    "nodes": "in the route",
    "number": "which link of the two ends it belongs to",
    "epoch": "of the source's membership",
    "sequence": "of the frame on that link",
    "ack": "the source has everything below this number",
}


def wire_format(made: str) -> str:
    """The whole page. `made` says where it comes from."""
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
    return "\n".join(["| At | Bytes | Field | What for |", "|---|---|---|---|", *rows])


def _places(layout: struct.Struct) -> Iterator[tuple[int, int]]:
    """Where each field begins, and its size; padding has no name."""
    at = 0
    for count, code in re.findall(r"(\d*)([A-Za-z])", layout.format):
        size = struct.calcsize(f"<{code}")
        for _ in range(int(count or 1)):
            if code != "x":
                yield at, size
            at += size
    assert at == layout.size


def _numbers(kind: type[IntEnum]) -> str:
    """A table of an enumeration: what is said of each number is the comment behind it."""
    said = dict(re.findall(r"^    (\w+) = \d+(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE))
    rows = [f"| {each.value} | {each.name} | {said[each.name].replace('|', chr(92) + '|')} |" for each in kind]
    return "\n".join([f"### {kind.__name__}", "", text_of(kind.__doc__), "", "| | | |", "|---|---|---|", *rows])


def _message(kind: type) -> str:
    described = f"### {kind.__struct_config__.tag}\n\n{text_of(kind.__doc__)}"  # type: ignore[attr-defined]
    fields = _fields(kind)
    return f"{described}\n\n{fields}" if fields else described


def _fields(kind: type) -> str:
    """With their types. Private names of types, which are bounds, are put as what they bound."""
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
    """The type that a private alias stands for, without its bounds."""
    origin = getattr(alias, "__origin__", alias)
    return getattr(origin, "__name__", str(origin))


def _picture(doc: str | None) -> str:
    """The drawing in a module's text."""
    lines = inspect.cleandoc(doc or "").splitlines()
    drawn: Iterable[str] = (line for line in lines if line.startswith("    "))
    return textwrap.dedent("\n".join(drawn))
