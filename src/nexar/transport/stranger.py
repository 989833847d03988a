"""What a peer may say that has not proven who it is: control messages, small ones.

The rule is applied to the header, before anything is kept for the body. So a stranger gets as much of our memory as one
small message needs, whatever it claims; and since no other kind of frame passes, it can start nothing.
"""

from __future__ import annotations

from typing import Final

from nexar.wire.codec import Bytes
from nexar.wire.frame import Frame, FrameError, Kind, Lane, decode

STRANGER_BYTES: Final = 4 << 10
"""The largest body: a hello, a proof, a signing request with some addresses."""
_ALLOWED: Final = "a control message from a peer that has not proven who it is"


def decode_from_stranger(buffer: Bytes, offset: int = 0) -> Frame:
    """As wire.frame.decode, and FrameError for all that is not a small control message, or the end (FINISH)."""
    frame = decode(buffer, offset)
    if frame.kind not in (Kind.CONTROL, Kind.FINISH):
        raise FrameError("kind", frame.kind, _ALLOWED)
    if frame.lane != Lane.CONTROL:
        raise FrameError("lane", frame.lane, _ALLOWED)
    if frame.body > STRANGER_BYTES:
        raise FrameError("body", frame.body, f"at most {STRANGER_BYTES} bytes in {_ALLOWED}")
    return frame
