"""Fills structs with values that follow from the names and types of their fields alone.

The value of a field depends on its name, so fields of one type that change places change the bytes. The name is the one
that is sent (`msgspec.field(name=…)`). A struct that is sent as an array sends no names: an attribute of one that was
renamed keeps its value by an entry in `FIRST_NAMES`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

FIRST_NAMES: Mapping[str, Mapping[str, str]] = {}
"""By golden key: today's name of a field of an array-like struct → its name when its golden bytes were written."""

_FINGERPRINT_BYTES = 32
_MEMBER_ADDRESSES = {"quic": ("192.0.2.7:4000", "[2001:db8::7]:4001"), "tls": ("192.0.2.7:4002",)}
_BY_HAND: Mapping[str, Mapping[str, Any]] = {
    "hello": {"role": "member", "nonce": bytes(range(32))},
    "membership member": {"fingerprint": _FINGERPRINT_BYTES, "addresses": _MEMBER_ADDRESSES},
    "membership attendant": {"fingerprint": _FINGERPRINT_BYTES},
    "dump": {"format": 1},
    "trace part": {"format": 1},
}
"""By golden key and first name: values with a form that the type does not tell; of bytes, how many there are."""


class Filler:
    """`keys`: golden keys of structs, which select what was written by hand for them, and their first names."""

    def __init__(self, keys: Mapping[type, str], first_names: Mapping[str, Mapping[str, str]] = FIRST_NAMES) -> None:
        self._keys, self._first_names = keys, first_names

    def full(self, kind: type, path: str = "") -> Any:
        """Every field differs from its default."""
        return kind(**{field.name: self._differing(kind, field, path) for field in self._fields(kind)})

    def least(self, kind: type) -> Any:
        """Every field has its default, if it has one; required fields that may be None are."""
        required = [field for field in self._fields(kind) if field.required]
        return kind(**{field.name: self._least(kind, field) for field in required})

    def variants(self, kind: type) -> Iterator[tuple[str, Any]]:
        """The full struct once more for each other value of a field that has a fixed set of values, and, where no names
        are sent, with each flag at its default: two flags that change places change one of them.
        """
        full, array_like = self.full(kind), kind.__struct_config__.array_like
        for field in self._fields(kind):
            name, now = self._first_name(kind, field), getattr(full, field.name)
            for value in _choices(field.type, flags=array_like):
                if value != now:
                    yield f"{name}={value}".lower(), msgspec.structs.replace(full, **{field.name: value})

    def _fields(self, kind: type) -> tuple[inspect.Field, ...]:
        described = inspect.type_info(kind)
        assert isinstance(described, inspect.StructType)
        return described.fields

    def _first_name(self, kind: type, field: inspect.Field) -> str:
        return self._first_names.get(self._keys.get(kind, ""), {}).get(field.encode_name, field.encode_name)

    def _differing(self, kind: type, field: inspect.Field, path: str) -> Any:
        name = self._first_name(kind, field)
        by_hand = _BY_HAND.get(self._keys.get(kind, ""), {}).get(name)
        seed = f"{path}.{name}" if path else name
        if by_hand is not None:
            return _bytes(seed, by_hand) if isinstance(by_hand, int) and _is_bytes(field.type) else by_hand
        value = self._value(field.type, seed)
        return self._value(field.type, f"{seed} again") if value == field.default else value

    def _least(self, kind: type, field: inspect.Field) -> Any:
        optional = isinstance(field.type, inspect.UnionType) and field.type.includes_none
        return None if optional else self._differing(kind, field, "")

    def _value(self, kind: inspect.Type, seed: str) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line for each type
        match kind:
            case inspect.Metadata():
                return self._value(kind.type, seed)
            case inspect.BoolType():
                return "again" not in seed
            case inspect.IntType():
                return _whole(kind, seed)
            case inspect.FloatType():
                return _real(kind, seed)
            case inspect.StrType():
                return _text(seed)[: kind.max_length]
            case inspect.BytesType():
                return _bytes(seed, min(max(8, kind.min_length or 0), kind.max_length or 8))
            case inspect.LiteralType():
                return min(kind.values)
            case inspect.UnionType():
                return self._value(next(each for each in kind.types if not isinstance(each, inspect.NoneType)), seed)
            case inspect.VarTupleType():
                return tuple(self._value(kind.item_type, f"{seed} {each}") for each in ("first", "second"))
            case inspect.ListType():
                return [self._value(kind.item_type, f"{seed} {each}") for each in ("first", "second")]
            case inspect.TupleType():
                return tuple(self._value(item, f"{seed} {place}") for place, item in enumerate(kind.item_types))
            case inspect.FrozenSetType():  # of one element: the order of more depends on the hash seed
                return frozenset((self._value(kind.item_type, f"{seed} only"),))
            case inspect.DictType():
                keys = [self._value(kind.key_type, f"{seed} key {each}") for each in ("first", "second")]
                return {key: self._value(kind.value_type, f"{seed} {key}") for key in keys}
            case inspect.StructType():
                return self.full(kind.cls, seed)
            case inspect.AnyType():
                return _text(seed)
        raise TypeError(f"{seed}: no golden value is known for {kind}; write one by hand")


def _choices(kind: inspect.Type, *, flags: bool) -> tuple[Any, ...]:
    if isinstance(kind, inspect.UnionType):
        return tuple(value for each in kind.types for value in _choices(each, flags=flags))
    if isinstance(kind, inspect.LiteralType):
        return tuple(sorted(kind.values))
    return (False, True) if flags and isinstance(kind, inspect.BoolType) else ()


def _is_bytes(kind: inspect.Type) -> bool:
    return isinstance(kind.type if isinstance(kind, inspect.Metadata) else kind, inspect.BytesType)


def _number(seed: str) -> int:
    return zlib.crc32(seed.encode())


def _whole(kind: inspect.IntType, seed: str) -> int:
    least = kind.ge if kind.ge is not None else (kind.gt or 0) + 1
    most = kind.le if kind.le is not None else (kind.lt or 1 << 20) - 1
    return int(least + 1 + _number(seed) % min(most - least, 100_000))


def _real(kind: inspect.FloatType, seed: str) -> float:
    """A multiple of 1/1024: exact, and the same text in JSON everywhere."""
    return (1 + _number(seed) % 1000) / 1024 * min(kind.le or 1024.0, 1024.0)


def _text(seed: str) -> str:
    """Lower-case letters alone, which every pattern allows; the end of the name, so that it can be read."""
    return "".join(each for each in seed[-24:].lower() if "a" <= each <= "z")


def _bytes(seed: str, size: int) -> bytes:
    return (_number(seed).to_bytes(4, "big") * (size // 4 + 1))[:size]
