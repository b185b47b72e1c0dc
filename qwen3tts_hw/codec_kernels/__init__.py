"""Forms of the codec decoder's streaming step behind one interface; :func:`create` is the only place that chooses one.

"plain" is the decoder's own torch code; the other names are fast forms made of kernels, imported when asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.codec_kernels.base import PRECISIONS, CodecWeights, FastDecoder, FastForm, StreamState
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.registry import Registry

__all__ = ["FAST_FORMS", "PRECISIONS", "CodecWeights", "FastDecoder", "FastForm", "StreamState", "create", "resolve"]

PLAIN = "plain"


def _fused(precision: str) -> FastForm:
    from qwen3tts_hw.codec_kernels.fused import FusedForm

    return FusedForm(precision)


FAST_FORMS: Registry[Callable[[str], FastForm]] = Registry("codec form")
FAST_FORMS.register("fused", _fused)


def resolve(name: str, backend: Backend, *, dtype: str = "float32") -> str:
    """The form's name; "auto" takes the one the backend prefers. Raises UnsupportedError where it cannot run.

    ``dtype`` is the plain form's: fast forms are made from float32 weights and choose their arithmetic by precision.
    """
    if name == "auto":
        return backend.capabilities.codec if dtype == "float32" else PLAIN
    if name == PLAIN:
        return name
    if name not in FAST_FORMS.names:
        names = ", ".join(("auto", PLAIN, *FAST_FORMS.names))
        raise UnsupportedError(f"unknown codec form {name!r}; supported: {names}")
    if not backend.capabilities.compile:
        raise UnsupportedError(
            f"the {name} codec was asked for, but the {backend.name} backend has no compiler for its kernels; "
            f"set codec_kernels to auto or plain"
        )
    if dtype != "float32":
        raise UnsupportedError(f"the {name} codec takes float32 weights; set codec_dtype to float32, not {dtype}")
    return name


def create(name: str, backend: Backend, *, precision: str, dtype: str = "float32") -> FastForm | None:
    """Make the fast form of that name with this precision; None for the plain form."""
    chosen = resolve(name, backend, dtype=dtype)
    if precision not in PRECISIONS:
        raise UnsupportedError(f"unknown codec precision {precision!r}; supported: {', '.join(PRECISIONS)}")
    return None if chosen == PLAIN else FAST_FORMS.get(chosen)(precision)
