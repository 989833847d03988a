"""Bytes under a golden key."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

NODE, OTHER_NODE, THIRD_NODE = 0x0102030405060708, 0x1112131415161718, 0x2122232425262728


class Sample(NamedTuple):
    """What the code writes now. `form`: what the bytes are, so that a difference can be shown in words."""

    key: str
    data: bytes
    form: str = "bytes"


def text(key: str, content: str) -> Sample:
    """Of a text."""
    return Sample(key, content.encode(), "text")


def json_text(key: str, value: Any) -> Sample:
    """Of names and values whose order does not matter."""
    return Sample(key, json.dumps(value, sort_keys=True).encode(), "json")
