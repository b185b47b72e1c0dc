"""Reading JSON objects with typed access: every error names the file and the full key. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3tts_hw.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; raise ConfigError if it is missing, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; a Qwen3-TTS checkpoint directory holds config.json, model.safetensors, the "
            "tokenizer files and the folder speech_tokenizer/"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, an object was expected")
    return value


class JsonSection:
    """A JSON object with typed access; every error names the file and the full key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.values or self.values[key] is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self.values[key]

    def section(self, key: str) -> JsonSection:
        """The object under a key."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, found {type(value).__name__}")
        return JsonSection(value, f"{self.where}: {key}")

    def section_or_empty(self, key: str) -> JsonSection:
        """The object under a key, or an empty one if the key is missing."""
        if self.values.get(key) is None:
            return JsonSection({}, f"{self.where}: {key}")
        return self.section(key)

    def text(self, key: str) -> str:
        """The string under a key."""
        value = self.get(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} must be a string, found {value!r}")
        return value

    def integer(self, key: str) -> int:
        """The integer under a key."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} must be an integer, found {value!r}")
        return value

    def size(self, key: str) -> int:
        """The integer under a key, at least 1."""
        value = self.integer(key)
        if value < 1:
            raise ConfigError(f"{self.where}: {key} must be at least 1, found {value}")
        return value

    def sizes(self, key: str) -> tuple[int, ...]:
        """The list of positive integers under a key."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) and item > 0 for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of positive integers, found {value!r}")
        return tuple(value)

    def number(self, key: str) -> float:
        """The number under a key."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {key} must be a number, found {value!r}")
        return float(value)

    def require(self, key: str, expected: int | bool | str) -> None:
        """Refuse a key that is missing or has any other value."""
        found = self.get(key)
        if found != expected:
            raise ConfigError(f"{self.where}: {key} is {found!r}; only {expected!r} is supported")
