"""The golden file: the bytes of everything that is sent or stored, under keys that outlive every renaming.

`python -m tests.architecture.golden` adds what is new. It changes or removes entries only with `--change`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from nexar.transport import quic
from nexar.wire.hello import PROTOCOL_VERSION
from tests.architecture.golden.files import file_samples
from tests.architecture.golden.formats import NATIVE, format_samples
from tests.architecture.golden.sample import Sample
from tests.architecture.golden.structs import struct_samples

PATH = Path(__file__).with_name("bytes.json")
ADD = "python -m tests.architecture.golden"
_SHOWN = 12
"""How many differences a message shows."""
_LONG = 100
"""Characters of an entry."""
_DECISION = f"""
What is sent or stored is not what it was, so nodes of the last release, or files that they wrote, are misunderstood.

- Not intended (a rename or a move): keep the bytes. A field of a map keeps its name on the wire by
  msgspec.field(name="old_name"); an enumeration keeps its numbers; a field of an array-like struct keeps its place.
  An array-like struct sends no names: for an attribute that was renamed, enter the old name in
  tests/architecture/golden/filling.py, FIRST_NAMES.
- Intended: first decide about the version. A new field that has a default, at the end of an array-like struct or in a
  map, is ignored by older nodes. Everything else on the wire needs another PROTOCOL_VERSION (wire/hello.py, now
  {PROTOCOL_VERSION}), and everything else in a file another number of its format. Then write the golden file anew:

      {ADD} --change
"""


@cache
def samples() -> dict[str, Sample]:
    """What the code writes now, by key."""
    found = [Sample(each.key, each.data, each.codec.form) for each in struct_samples()]
    found += [*format_samples(), *file_samples()]
    by_key = {sample.key: sample for sample in found}
    assert len(by_key) == len(found), "two samples have one golden key"
    return by_key


def golden() -> dict[str, str]:
    """What the file holds, without the keys that cannot be made here."""
    content: dict[str, str] = json.loads(PATH.read_text("utf-8"))
    native = quic.missing_support() is None
    return {key: text for key, text in content.items() if native or not key.startswith(NATIVE)}


def written(sample: Sample) -> str:
    """As the file holds it."""
    return f"text {sample.data.decode()}" if sample.form in ("text", "json") else f"hex {sample.data.hex()}"


def differences(old: dict[str, str], new: dict[str, Sample]) -> list[str]:
    """For each entry that changed or is gone: its key, what it was, and what it is now."""
    changed = [key for key in old if key not in new or written(new[key]) != old[key]]
    return [_difference(key, old[key], new.get(key)) for key in changed]


def complaint(found: list[str]) -> str:
    """The message for these differences."""
    more = f"\n… and {len(found) - _SHOWN} more\n" if len(found) > _SHOWN else ""
    return f"{len(found)} golden entries differ\n\n" + "\n".join(found[:_SHOWN]) + more + _DECISION


def _difference(key: str, old: str, new: Sample | None) -> str:
    if new is None:
        return f"{key}\n  was  {old}\n  now  nothing has this key\n"
    was, now = (_readable(text, new.form) for text in (old, written(new)))
    return f"{key}\n  was  {was}\n  now  {now}\n{_first_difference(was, now)}"


def _first_difference(was: str, now: str) -> str:
    """Where to look, in a long entry."""
    if max(len(was), len(now)) < _LONG:
        return ""
    at = next((place for place, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    left, right = (text[max(0, at - 20) : at + 60].partition("\n")[0] for text in (was, now))
    return f"  first difference, at character {at}:\n       …{left}\n       …{right}\n"


def _readable(text: str, form: str) -> str:
    """The entry; decoded where its bytes say what they are, and then the bytes."""
    kind, _, content = text.partition(" ")
    if kind == "text":
        return content.replace("\n", "\n       ")
    data = bytes.fromhex(content)
    meant = _decoded(data, form)
    return content if meant is None else f"{meant}\n       {content}"


def _decoded(data: bytes, form: str) -> str | None:
    start = 4 if form == "prefixed msgpack" else 0
    if "msgpack" not in form:
        return None
    try:
        value: Any = msgspec.msgpack.decode(data[start:])
    except msgspec.MsgspecError as error:
        return f"(not MessagePack: {error})"
    return f"{data[:start]!r} {value}" if start else str(value)


def bring_up_to_date(*, change: bool) -> str:
    """Bring the file up to date; what was done. SystemExit if entries would change and may not."""
    old, new = golden() if PATH.exists() else {}, samples()
    found = differences(old, new)
    if found and not change:
        raise SystemExit(complaint(found))
    kept = (
        {}
        if not PATH.exists()
        else {key: text for key, text in json.loads(PATH.read_text("utf-8")).items() if key not in old}
    )
    entries = kept | {key: written(sample) for key, sample in new.items()}
    PATH.write_text(json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    return f"{len(entries)} entries: {len(set(new) - set(old))} new, {len(found)} changed or removed\n"


def _kept(known: dict[str, str]) -> dict[str, str]:
    """Entries that cannot be made here."""
    content: dict[str, str] = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    return {key: text for key, text in content.items() if key not in known}
