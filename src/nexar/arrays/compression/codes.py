"""Compressors as 31-bit numbers, packed so that differences between ranks can be described.

3 bits    kind
1 bit     with residual: RandomK rescales without one, so ranks must agree
1 bit     the rest is a digest, because it did not fit
26 bits   a ratio (4 bits negative power of ten, 22 bits digits), or format and block, or a digest
"""

from __future__ import annotations

import zlib
from decimal import Decimal
from typing import Final

from nexar.arrays.compression.base import Compressor
from nexar.arrays.compression.quantized import FORMATS, FP8, Int8, NoCompression
from nexar.arrays.compression.sparse import RandomK, TopK

# These numbers are the wire format: never reuse one. 7 is for user compressors.
_KINDS: Final[dict[type[Compressor], int]] = {NoCompression: 1, TopK: 2, RandomK: 3, FP8: 4, Int8: 5}
_NAMES: Final = {kind: each.__name__ for each, kind in _KINDS.items()}
_USER_KIND: Final = 7
_KIND_AT: Final = 28
_FEEDBACK: Final = 1 << 27
_DIGEST: Final = 1 << 26
_LOW: Final = 22  # bits
_DIGITS: Final = 1 << _LOW
_TENS: Final = 16
_FORMATS: Final = tuple(FORMATS)


def code_of_compressor(compressor: Compressor, *, feedback: bool, piece_bytes: int = 0) -> int:
    """Returns a number that identifies the compressor; digests collide once in 67 million."""
    kind = _KINDS.get(type(compressor), _USER_KIND)
    fact = _fact(compressor)
    if fact is None or kind == _USER_KIND:
        # Shared memory would not detect different piece lengths, or gathering on some ranks and reducing on others.
        said = f"{compressor.name} {compressor.linear} {piece_bytes}"
        fact = _DIGEST | zlib.crc32(said.encode(errors="backslashreplace")) % _DIGEST
    return kind << _KIND_AT | (_FEEDBACK if feedback else 0) | fact


def describe_code(mark: int) -> str:
    """Returns text such as `TopK(0.01) with a residual`."""
    return f"{_described(mark)} {'with' if mark & _FEEDBACK else 'without'} a residual"


def _fact(compressor: Compressor) -> int | None:
    """Returns None if it does not fit."""
    match compressor:
        case TopK() | RandomK():
            return _packed(compressor.ratio)
        case FP8():
            return _FORMATS.index(compressor.format) << _LOW | compressor.block
        case Int8():
            return compressor.block
        case _:
            return 0


def _packed(ratio: float) -> int | None:
    _, digits, exponent = Decimal(repr(ratio)).as_tuple()
    number, tens = int("".join(map(str, digits))), -int(exponent)
    return tens << _LOW | number if number < _DIGITS and tens < _TENS else None


def _described(mark: int) -> str:
    kind, fact = mark >> _KIND_AT, mark % _DIGEST
    if kind not in _NAMES:
        return f"a compressor of the digest {fact:x}"
    name = _NAMES[kind]
    if mark & _DIGEST:
        return f"{name} of the digest {fact:x}"
    high, low = divmod(fact, _DIGITS)
    if name in ("TopK", "RandomK"):
        return f"{name}({float(Decimal(low).scaleb(-high))!r})"
    if name == "FP8":
        return f"FP8({_FORMATS[high % len(_FORMATS)]}, block={low})"
    return f"Int8(block={low})" if name == "Int8" else f"{name}()"
