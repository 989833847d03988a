"""What can be set: one frozen value, `Config`, and the description of each of its settings.

Nothing here reads the environment or a file: `nexar.environment` does, at the edge, and hands a `Config` in.
"""

from nexar.config.config import Config, Setting, agreed_settings, settings
from nexar.config.kinds import Kind, Refused

__all__ = ["Config", "Kind", "Refused", "Setting", "agreed_settings", "settings"]
