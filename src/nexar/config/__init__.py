"""What can be set: one frozen value, `Config`, and the description of each of its settings.

Nothing here reads the environment or a file: `nexar.environment` does, at the edge, and hands a `Config` in.
"""

from nexar.config.settings import Config, Setting, agreed_settings, settings
from nexar.config.value_types import ValueRefused, ValueType

__all__ = ["Config", "Setting", "ValueRefused", "ValueType", "agreed_settings", "settings"]
