"""`nexar.Seed`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexar.cluster.decisions.admission_events import SeedEvent
from nexar.cluster.seed import SeedService as ConfiguredSeed
from nexar.config import Config
from nexar.launch.init import choose_config


class Seed(ConfiguredSeed):
    """Opens a cluster of `size` members. As `SeedService`, with settings from arguments, `config`, environment and its
    file.
    """

    def __init__(
        self,
        listen: str | None = None,
        size: int | None = None,
        *,
        config: Config | None = None,
        state_dir: str | Path | None = None,
        on_event: Callable[[SeedEvent], None] | None = None,
        **settings: Any,
    ) -> None:
        """ConfigError for an unknown setting or a wrong value."""
        chosen = choose_config(config, settings)
        super().__init__(listen, size, config=chosen, state_dir=state_dir, on_event=on_event)
