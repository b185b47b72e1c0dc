"""Random weights for a checkpoint of any size: values that make a network behave, the same on every machine.

Every tensor is drawn from its own generator, seeded by the checkpoint's seed and the tensor's name, so neither order
nor the other tensors matter. 16 random bits index a table of 65,536 normal quantiles; arithmetic on the way is exact
or correctly rounded. Scales are chosen so that greedy codes vary and the codec's output neither saturates nor vanishes
(see :func:`_scale`); the default initialisation of the layers would give flat logits. Knows no file format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from qwen3tts_hw.config import ModelConfig

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
_CHUNK = 1 << 25  # elements; larger tensors are produced in several pieces

# The channel of the talker's residual stream that carries a constant when speech must not end (see SilencedEnd).
_END_CHANNEL = 0
_END_CONSTANT = 2.0
_END_WEIGHT = -4096.0
_END_GAIN = 2.0


def draw(name: str, shape: tuple[int, ...], *, seed: int, bfloat16: bool) -> Iterator[Array]:
    """Yield a tensor's values, flat and in order, in pieces of at most 2**25 elements.

    float32, or bfloat16 bit patterns as uint16 (rounded to nearest even).
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32))
    table = _value_table(name, shape)
    lookup: Array = round_to_bfloat16(table) if bfloat16 else table
    remaining = math.prod(shape)
    while remaining:
        count = min(remaining, _CHUNK)
        yield lookup[np.frombuffer(generator.bytes(2 * count), "<u2")]
        remaining -= count


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 values to bfloat16, to nearest even; return the bit patterns."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


class SpeechEnd:
    """How readily a random talker ends its speech: an edit applied to some of its tensors.

    Left alone, end of speech would be one of 2,049 equals and come after some 2,000 frames. With ``enabled``, its row
    of ``codec_head`` is doubled, which ends speech after tens of frames. Without, it can never win: channel 0 of the
    talker's residual stream is made a positive constant (the text side of every row contributes it, nothing else writes
    to it, and the final norm keeps its sign), and the row of end of speech is a large negative weight on that channel
    alone. Its logit is then far below all others, whatever the input.
    """

    def __init__(self, config: ModelConfig, *, enabled: bool) -> None:
        self._row, self._enabled = config.codec_tokens.eos, enabled

    def edit(self, name: str, values: npt.NDArray[np.float32]) -> bool:
        """Change a tensor in place, shaped as in the file; return whether anything was changed."""
        if self._enabled:
            if name == "talker.codec_head.weight":
                values[self._row] *= _END_GAIN
                return True
            return False
        return self._silence(name, values)

    def concerns(self, name: str) -> bool:
        """Whether :meth:`edit` may change this tensor."""
        if self._enabled:
            return name == "talker.codec_head.weight"
        return name.startswith("talker.") and (
            "codec_embedding" in name
            or name.startswith("talker.text_projection.linear_fc2")
            or name in ("talker.model.norm.weight", "talker.codec_head.weight")
            or _writes_to_talker_stream(name)
        )

    def _silence(self, name: str, values: npt.NDArray[np.float32]) -> bool:
        channel = _END_CHANNEL
        if name == "talker.codec_head.weight":
            values[self._row] = 0.0
            values[self._row, channel] = _END_WEIGHT
        elif name == "talker.model.norm.weight":
            values[channel] = 1.0
        elif name == "talker.text_projection.linear_fc2.bias":
            values[channel] = _END_CONSTANT
        elif name == "talker.text_projection.linear_fc2.weight" or _writes_to_talker_stream(name):
            values[channel] = 0.0
        elif "codec_embedding" in name:
            values[:, channel] = 0.0
        else:
            return False
        return True


def _writes_to_talker_stream(name: str) -> bool:
    return name.startswith("talker.model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight"))


@cache
def _normal_quantiles() -> npt.NDArray[np.float32]:
    """65,536 quantiles of the standard normal distribution, in ascending order."""
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse(0.5 + (index + 0.5) / 65_536) for index in range(32_768)])
    # A grid of 2**-16 hides the last bits of the platform's logarithm.
    upper = np.round(upper * 65_536) / 65_536
    table: npt.NDArray[np.float32] = np.concatenate([-upper[::-1], upper]).astype(np.float32)
    return table


def _value_table(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The values that a tensor's elements are drawn from."""
    normal, last = _normal_quantiles(), name.rsplit(".", 1)[-1]
    if last == "initialized":
        return np.ones_like(normal)
    if last == "cluster_usage":
        return np.float32(1.0) + np.float32(0.5) * np.abs(normal)
    if last in ("scale", "gamma"):
        return np.float32(0.7) + np.float32(0.3) * normal
    if last == "weight" and len(shape) == 1:  # norms
        return np.float32(1.0) + np.float32(0.2) * normal
    return np.float32(_scale(name, shape)) * normal


def _scale(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a tensor that is centred on zero."""
    last = name.rsplit(".", 1)[-1]
    fixed = {"bias": 0.1, "alpha": 0.3, "beta": 0.3, "embedding_sum": 3.0, "embed_sum": 3.0}
    if last in fixed:
        return fixed[last]
    if "embedding" in name:
        return 0.7
    return _gain(name, shape) / math.sqrt(_fan_in(name, shape))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Inputs that reach one output; transposed convolutions store ``[in, out, k]`` and overlap k / stride times."""
    if name.startswith("decoder.upsample.") and name.endswith(".0.conv.weight"):
        return shape[0]
    if name.startswith("decoder.decoder.") and name.endswith(".block.1.conv.weight"):
        return 2 * shape[0]
    return math.prod(shape[1:])


def _gain(name: str, shape: tuple[int, ...]) -> float:
    """Factor on 1 / sqrt(fan-in): residual branches of the codec's decoder and its output are kept small."""
    if not name.startswith("decoder."):
        return 1.3
    if name.startswith("decoder.decoder.") and shape[0] == 1:
        return 0.15
    return 0.3 if name.endswith(".conv2.conv.weight") else 0.9
