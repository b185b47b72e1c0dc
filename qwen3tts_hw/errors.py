"""The exception tree. Every error a user can cause or must act on is one of these.

Qwen3TTSError
├── SettingsError        a setting or environment variable has a bad name or value
├── ConfigError          a config.json is missing, malformed or describes another model
├── CheckpointError      weight files are missing, truncated, or do not match the config
├── UnsupportedError     this device, version or option cannot do what was asked
├── RequestError         a request is invalid; carries the field to blame
│   ├── UnknownVoiceError
│   └── VoiceExistsError
├── CapacityError        no room for the request now; trying later can work
├── StorageError         the voice registry's folder cannot be read or written, or has no room
├── AttentionMaskError   an attention call that the fused kernel would answer wrongly
├── GraphCaptureError    a device graph could not be captured or replayed
└── GenerationError      the engine failed while a request was running
"""

from __future__ import annotations


class Qwen3TTSError(Exception):
    """Base of all errors raised on purpose by this package."""


class SettingsError(Qwen3TTSError, ValueError):
    """A setting has an unknown name or an unusable value."""


class ConfigError(Qwen3TTSError, ValueError):
    """A checkpoint's config.json is missing, malformed or not a Qwen3-TTS 12 Hz model."""


class CheckpointError(Qwen3TTSError):
    """A checkpoint's files are missing, damaged, or disagree with its config.json."""


class UnsupportedError(Qwen3TTSError):
    """What was asked for cannot be done on this device, version or configuration."""


class RequestError(Qwen3TTSError, ValueError):
    """A request cannot be served as it stands.

    ``field`` names the request field to blame, in the spelling of the HTTP interface.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class UnknownVoiceError(RequestError):
    """The named voice is neither in the checkpoint nor registered."""


class VoiceExistsError(RequestError):
    """A voice of that name is registered already."""


class CapacityError(Qwen3TTSError):
    """There is no room for the request now."""


class StorageError(Qwen3TTSError):
    """Voices cannot be stored or read: no space, no quota left, no permission, or a damaged folder."""


class AttentionMaskError(Qwen3TTSError, ValueError):
    """An attention call whose mask or shape the fused kernel would silently misread."""


class GraphCaptureError(Qwen3TTSError, RuntimeError):
    """A device graph could not be captured, or was replayed where that is not allowed."""


class GenerationError(Qwen3TTSError, RuntimeError):
    """The engine failed or was shut down while a request was running."""
