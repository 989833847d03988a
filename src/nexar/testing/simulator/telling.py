"""One line for each event, for the record."""

from __future__ import annotations

from nexar.cluster.decisions.succession_events import Event, Found, Heard, Lost, Probed, Wanted, Word
from nexar.types import NodeId
from nexar.wire.messages import Suspect


def tell(node: NodeId, event: Event) -> str:
    """What happens to a node."""
    match event:
        case Heard(sender=sender, word=word):
            return f"{node} ← {sender}: {describe(word)}"
        case Lost(node=lost, willing=willing, cause=cause):
            return f"{node} loses {lost}{' (willing)' if willing else ''}: {cause}"
        case Found(node=found, severed=severed):
            return f"{node} finds {found}{' (severed)' if severed else ''}"
        case Probed(node=probed, cause=cause):
            return f"{node} has probed {probed}: {cause or 'it answers'}"
        case Wanted():
            joined, left = [each.node for each in event.joined], [each.node for each in event.left]
            return f"{node} wants {joined} in, {left} out"
        case _:
            return f"{node}: {type(event).__name__}"


def describe(word: Word) -> str:
    """A word, without its value."""
    if isinstance(word, Suspect):
        return f"Suspect {word.node} by {word.by} in epoch {word.epoch}"
    ballot = getattr(word, "ballot", None)
    number = f" {ballot.round}.{ballot.node}" if ballot is not None else ""
    return f"{type(word).__name__}{number} of epoch {word.instance[1]}"
