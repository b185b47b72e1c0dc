"""The user's choices, and the only reader of the environment.

A setting comes from a mapping (vLLM's ``--additional-config '{"qwen3tts": {...}}'``) or from ``QWEN3TTS_<NAME>``; the
mapping wins. Unknown names and unusable values raise :class:`~qwen3tts_hw.errors.SettingsError`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen3tts_hw.errors import SettingsError

ENVIRONMENT_PREFIX = "QWEN3TTS_"
_CHOICES: dict[str, tuple[str, ...]] = {
    "graphs": ("auto", "on", "off", "recording"),
    "attention_op": ("auto", "sdpa", "npu_fusion", "npu_fusion_v3", "npu_fused_infer", "npu_reference"),
    "predictor": ("auto", "plain", "compiled", "fused"),
    "codec_dtype": ("float32", "bfloat16"),
    "codec_kernels": ("auto", "plain", "fused"),
    "codec_precision": ("high", "medium", "low"),
    "weight_layout": ("auto", "plain", "packed"),
}

_MAY_BE_ZERO = ("ref_audio_trailing_silence_ms", "voices_primed")


@dataclass(frozen=True, slots=True)
class Settings:
    """All choices with their defaults.

    graphs: "on" captures the frame step in device graphs and fails if that cannot be done; "auto" does so where the
        device has graphs; "off" never does. "recording" imitates device graphs on any device, for tests and
        debugging: slow, but with their rules.
    attention_op: the code predictor's attention kernel; "auto" asks the backend.
    predictor: form of the code predictor; "plain" is the reference in torch operations, "compiled" the same through
        torch.compile, "fused" a chain of kernels of its own; "auto" asks the backend.
    codec_dtype: arithmetic of the codec decoder's plain form.
    codec_kernels: the codec decoder's form; "fused" needs float32 weights; "auto" asks the backend.
    codec_precision: arithmetic of the fused form. Largest difference from float32 in samples of [-1, 1]: "high" 3e-4,
        "medium" 6e-4, "low" 5e-3 (plain form in bfloat16: 5e-2); random weights of the published size.
    weight_layout: "packed" keeps the code predictor's matrices (and the local engine's talker's) in the device's own
        layout; "auto" asks the backend.
    codec_device: a device of its own for the codec, such as "cuda:1"; empty: the talker's.
    codec_rows: most streams in one captured codec step; more run in slices.
    first_chunk_frames: frames decoded and sent first; chunks double from there.
    chunk_frames: most frames per chunk.
    kernels_dir: folder that compiled kernels are kept in from one start to the next; empty: TRITON_CACHE_DIR if it is
        set, else qwen3tts_hw/kernels below XDG_CACHE_HOME or ~/.cache.
    max_streams: upper bound for concurrent requests (slots); vLLM's max_num_seqs is lowered to it.
    max_text_chars: longest text accepted, in characters.
    max_body_bytes: largest HTTP request body accepted, in bytes.
    max_queued_requests: requests running or waiting per API server before new ones are refused with 503.
    audio_host: empty, or this API server's address for workers on other machines (audio then goes over tcp).
    max_queue_bytes: audio buffered for a slow client before its request is aborted, in bytes.
    ref_audio_max_bytes / ref_audio_max_seconds: largest and longest reference audio accepted for voice cloning.
    ref_audio_allowed_hosts: hosts, or host:port, separated by commas, that reference audio may be fetched from over
        http or https; empty: none.
    ref_audio_allowed_folders: absolute folders, separated by commas, whose files file:// URLs may name; empty: none.
    ref_audio_trim_silence / ref_audio_normalize_loudness / ref_audio_trailing_silence_ms: clean-up of reference audio
        unless a request says otherwise: cut silent ends, bring the speech to -23 dB, append silence (against the
        reference's last sound being heard at the start of the speech).
    voices_dir: folder of registered voices; empty: qwen3tts_hw/voices below XDG_DATA_HOME or ~/.local/share.
    voices_max_count / voices_max_bytes: most voices that may be registered, and their size on disk.
    voices_keep_audio: store the recording with a registered voice, not only what the encoders heard in it.
    voices_primed: references, the latest used, whose codec state is kept on the device, up to 9 MB each at the
        published size, so that requests in such a voice start sooner; 0: none.
    trace: keep each frame's hidden state on the worker for debugging (memory grows with every frame).
    """

    graphs: str = "auto"
    attention_op: str = "auto"
    predictor: str = "auto"
    codec_dtype: str = "float32"
    codec_kernels: str = "auto"
    codec_precision: str = "medium"
    weight_layout: str = "auto"
    codec_device: str = ""
    codec_rows: int = 64
    first_chunk_frames: int = 1
    chunk_frames: int = 8
    kernels_dir: str = ""
    max_streams: int = 128
    max_text_chars: int = 20_000
    max_body_bytes: int = 262_144
    max_queued_requests: int = 1_024
    audio_host: str = ""
    max_queue_bytes: int = 33_554_432
    ref_audio_max_bytes: int = 25_000_000
    ref_audio_max_seconds: int = 60
    ref_audio_allowed_hosts: str = ""
    ref_audio_allowed_folders: str = ""
    ref_audio_trim_silence: bool = False
    ref_audio_normalize_loudness: bool = False
    ref_audio_trailing_silence_ms: int = 0
    voices_dir: str = ""
    voices_max_count: int = 1_000
    voices_max_bytes: int = 1_000_000_000
    voices_keep_audio: bool = False
    voices_primed: int = 16
    trace: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; supported: {', '.join(choices)}")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in _MAY_BE_ZERO else 1
            if item.type == "int" and value < least:
                raise SettingsError(f"{item.name} is {value}; it must be at least {least}")
        if self.first_chunk_frames > self.chunk_frames:
            raise SettingsError(
                f"first_chunk_frames {self.first_chunk_frames} is larger than chunk_frames {self.chunk_frames}"
            )
        for folder in listed(self.ref_audio_allowed_folders):
            if not folder.startswith("/") or ".." in folder.split("/"):
                raise SettingsError(f"ref_audio_allowed_folders names {folder!r}; an absolute path is needed")

    @classmethod
    def resolve(cls, values: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
        """Merge explicit ``values`` over the environment over the defaults."""
        environment = os.environ if environment is None else environment
        known = {item.name: str(item.type) for item in dataclasses.fields(cls)}
        merged: dict[str, Any] = {}
        for variable, raw in environment.items():
            if variable.startswith(ENVIRONMENT_PREFIX):
                name = variable[len(ENVIRONMENT_PREFIX) :].lower()
                merged[name] = _convert(name, raw, known, source=variable)
        if not isinstance(values, Mapping | None):
            raise SettingsError(f"qwen3tts is {values!r}; an object of settings was expected")
        for name, raw in (values or {}).items():
            merged[name] = _convert(name, raw, known, source=f"qwen3tts.{name}")
        return cls(**merged)

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain values, for logs, /health and benchmark results."""
        return dataclasses.asdict(self)


def variable(name: str) -> str:
    """A variable that a device's own software reads too; "" if it is not set."""
    return os.environ.get(name, "")


def listed(value: str) -> tuple[str, ...]:
    """The entries of a setting that is a list separated by commas."""
    return tuple(entry.strip() for entry in value.split(",") if entry.strip())


def voices_folder(settings: Settings, environment: Mapping[str, str] | None = None) -> str:
    """Where registered voices are kept."""
    if settings.voices_dir:
        return os.path.expanduser(settings.voices_dir)  # noqa: PTH111 - a string is what is wanted
    return f"{_home('XDG_DATA_HOME', '~/.local/share', environment)}/qwen3tts_hw/voices"


def kernels_folder(settings: Settings, environment: Mapping[str, str] | None = None) -> str:
    """Where compiled kernels are kept."""
    if settings.kernels_dir:
        return os.path.expanduser(settings.kernels_dir)  # noqa: PTH111 - as above
    environment = os.environ if environment is None else environment
    chosen = environment.get("TRITON_CACHE_DIR", "")
    return chosen or f"{_home('XDG_CACHE_HOME', '~/.cache', environment)}/qwen3tts_hw/kernels"


def _home(variable: str, default: str, environment: Mapping[str, str] | None) -> str:
    """A user's base folder."""
    folder = (os.environ if environment is None else environment).get(variable, "")
    if not folder.startswith("/"):  # the specification says to ignore relative paths
        folder = os.path.expanduser(default)  # noqa: PTH111 - as above
    return folder


def _convert(name: str, raw: Any, known: Mapping[str, str], source: str) -> Any:
    if name not in known:
        raise SettingsError(f"{source}: unknown setting {name!r}; known: {', '.join(sorted(known))}")
    kind = known[name]
    if kind == "bool":
        text = str(raw).lower()
        if text in ("1", "true", "yes", "on"):
            return True
        if text in ("0", "false", "no", "off"):
            return False
        raise SettingsError(f"{source} is {raw!r}; expected true or false")
    if kind == "int":
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise SettingsError(f"{source} is {raw!r}; expected an integer")
        try:
            return int(raw)
        except ValueError:
            raise SettingsError(f"{source} is {raw!r}; expected an integer") from None
    if not isinstance(raw, str):
        raise SettingsError(f"{source} is {raw!r}; expected a string")
    return raw
