"""Settings and the units they are written in; imports nothing else of headrace."""

from headrace.config.settings import Loaded, Settings, SettingsError, load

__all__ = ["Loaded", "Settings", "SettingsError", "load"]
