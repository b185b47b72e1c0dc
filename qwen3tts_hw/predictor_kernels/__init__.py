"""Forms of the code predictor behind one interface; :func:`create` is the only place where one is chosen by name.

"plain" and "compiled" are the model's own torch code, run as it is or through torch.compile, one layer at a time; the
other names are fast forms made of kernels. A fast form is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.predictor_kernels.base import (
    BegunFrame,
    FastForm,
    FastPredictor,
    LayerWeights,
    PredictorWeights,
    SlotTensors,
)
from qwen3tts_hw.registry import Registry

__all__ = [
    "FAST_FORMS",
    "TORCH_FORMS",
    "BegunFrame",
    "FastForm",
    "FastPredictor",
    "LayerWeights",
    "PredictorWeights",
    "SlotTensors",
    "create",
    "resolve",
]

TORCH_FORMS = ("plain", "compiled")


def _fused(backend: Backend) -> FastForm:
    from qwen3tts_hw.predictor_kernels.fused import FusedForm

    return FusedForm(early=backend.capabilities.early_launch)


FAST_FORMS: Registry[Callable[[Backend], FastForm]] = Registry("predictor form")
FAST_FORMS.register("fused", _fused)


def resolve(name: str, backend: Backend) -> str:
    """The form's name; "auto" takes the one the backend prefers. Raises UnsupportedError where it cannot run."""
    chosen = backend.capabilities.predictor if name == "auto" else name
    if chosen in TORCH_FORMS:
        if chosen == "compiled" and not backend.capabilities.compile:
            raise UnsupportedError(
                f"the compiled predictor was asked for, but the {backend.name} backend cannot compile"
            )
        return chosen
    if chosen not in FAST_FORMS.names:
        names = ", ".join(("auto", *TORCH_FORMS, *FAST_FORMS.names))
        raise UnsupportedError(f"unknown predictor form {chosen!r}; supported: {names}")
    if not backend.capabilities.compile:
        raise UnsupportedError(
            f"the {chosen} predictor was asked for, but the {backend.name} backend has no compiler for its kernels; "
            f"set predictor to auto or plain"
        )
    return chosen


def create(name: str, backend: Backend) -> FastForm | None:
    """Make the fast form of that name; None for the forms that are torch code."""
    chosen = resolve(name, backend)
    return None if chosen in TORCH_FORMS else FAST_FORMS.get(chosen)(backend)
