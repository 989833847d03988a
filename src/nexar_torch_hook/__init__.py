"""Registers the backend "nexar". torch calls it at the end of its own import, in every process.

It is outside of the package `nexar`, so that importing torch does not import nexar.
"""

from typing import Any


def register() -> None:
    """Make `init_process_group("nexar")` known; nexar is imported on first use."""
    import torch.distributed as dist  # noqa: PLC0415  # torch is being imported already

    if dist.is_available():
        dist.Backend.register_backend("nexar", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: object) -> Any:
    from nexar.torch.creation import create  # noqa: PLC0415  # not imported with torch

    return create(options, backend_options)
