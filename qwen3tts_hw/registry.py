"""A named table of factories: the one way in which a seam's implementations are looked up.

Knows nothing of what it stores. A factory imports its implementation when it is called, so that a registry may list
what this machine cannot import.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from qwen3tts_hw.errors import UnsupportedError

T = TypeVar("T")


class Registry(Generic[T]):
    """Map names to factories; ``kind`` says in messages what is registered."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, T] = {}

    def register(self, name: str, factory: T) -> None:
        """Add a factory; raises ValueError if the name is taken."""
        if name in self._factories:
            raise ValueError(f"{self.kind} {name!r} is already registered")
        self._factories[name] = factory

    def get(self, name: str) -> T:
        """Return the factory; raises UnsupportedError listing the names that exist."""
        if name not in self._factories:
            raise UnsupportedError(f"unknown {self.kind} {name!r}; supported: {', '.join(self.names)}")
        return self._factories[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All registered names, in the order of registration."""
        return tuple(self._factories)
