"""What torch calls at the end of its own import, in every process: it makes the backend "nexar" known, and no more.

It stands outside of the package `nexar` because who imports torch need not pay for importing that.
"""

from typing import Any


def register() -> None:
    """Make `init_process_group("nexar")` known; what it needs is imported when somebody asks for it."""
    import torch.distributed as dist  # noqa: PLC0415  # torch calls this, so it is there

    if dist.is_available():
        dist.Backend.register_backend("nexar", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: object) -> Any:
    from nexar.torch.creation import create  # noqa: PLC0415  # see above

    return create(options, backend_options)
