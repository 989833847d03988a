"""What the bytes of a message are, when they are no array: numbers of a frame's dtype field that name no dtype.

Numbers are the wire format: never reuse one. Those of dtypes grow from 0, these fall from 255.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

OBJECT: Final = 255
"""A value, encoded without running anybody's code to read it."""
PICKLE: Final = 254
"""A value that runs code when it is read: only for who asked for it."""
BUFFERS: Final = 253
"""The bytes of several buffers."""
FORMS: Final = 240
"""From here on a number is a form."""

OTHER_FORMS: Final = MappingProxyType(
    {
        OBJECT: ("an object", "recv_object()"),
        PICKLE: ("a pickled object", "recv_object(pickle=True), if you trust who sent it with your process"),
        BUFFERS: ("a list of buffers", "recv_iov()"),
    }
)
"""How errors name a form, and the verb that takes it."""
