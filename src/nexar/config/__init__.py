"""`Config`, and the description of each setting. `nexar.environment` reads the environment and files, not this
package.
"""

from nexar.config.settings import Config, Setting, agreed_settings, settings
from nexar.config.value_types import ValueRefused, ValueType

__all__ = ["Config", "Setting", "ValueRefused", "ValueType", "agreed_settings", "settings"]
