"""`nexar.Seed`: a seed with the settings of this process's environment, as `init`, `local` and `spawn` have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexar.cluster.decisions.admission_events import SeedEvent
from nexar.cluster.seed import SeedService as ConfiguredSeed
from nexar.config import Config
from nexar.launch.init import choose_config


class Seed(ConfiguredSeed):
    """A seed of a cluster of `size` members (`nexar.cluster.seed.SeedService`) whose settings come from arguments, then
    `config`, then the environment and the file it names.
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
        """ConfigError for a setting that there is not, or that cannot have its value."""
        chosen = choose_config(config, settings)
        super().__init__(listen, size, config=chosen, state_dir=state_dir, on_event=on_event)
