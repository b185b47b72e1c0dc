"""What a worker's parts refuse, whatever they are made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qwen3tts_hw import backends
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.vllm_plugin.assembly import SpeechParts


@pytest.mark.parametrize(("predictor", "codec"), [(False, False), (True, False), (False, True)])
def test_weights_that_kernels_have_copied_cannot_be_replaced(predictor: bool, codec: bool) -> None:
    parts = SimpleNamespace(
        backend=backends.resolve("cpu"),
        predictor=SimpleNamespace(fast=object() if predictor else None),
        codec=SimpleNamespace(is_fast=codec),
    )
    if predictor or codec:
        with pytest.raises(UnsupportedError, match="predictor=plain and codec_kernels=plain"):
            SpeechParts.check_reload(parts)
    else:
        SpeechParts.check_reload(parts)
