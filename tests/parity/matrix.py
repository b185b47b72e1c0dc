"""The parity matrix as a table: what is compared with what, on which device, by which comparator and tolerance.

A cell is one comparison. Only meaningful combinations are listed: a device has the attention ops that exist there, the
inference operator of Ascend takes no float32, the codec has an attention of its own. Nothing here runs anything.

The reference of every cell is eager arithmetic with scaled_dot_product_attention in float32 on a CPU, one row at a
time; ``local codes`` on that path is what is held to the golden files of the official package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EMULATED = "npu-emulated"
DEVICES = ("cpu", "cuda", EMULATED, "npu")
ALL_BATCHES = (1, 3, 8)
BUCKETS = (1, 2, 4, 8)  # so that batch 3 runs padded, in the bucket of 4
FLOAT32, BFLOAT16 = "float32", "bfloat16"

# Attention op -> its dtypes, by device. "npu_reference" models in plain torch what the fusion operators document.
_EVERYWHERE = {"sdpa": (FLOAT32, BFLOAT16), "npu_reference": (FLOAT32, BFLOAT16)}
_ASCEND = {**_EVERYWHERE, "npu_fusion_v3": (FLOAT32, BFLOAT16), "npu_fused_infer": (BFLOAT16,)}
ATTENTION = {"cpu": _EVERYWHERE, "cuda": _EVERYWHERE, EMULATED: _ASCEND, "npu": _ASCEND}

EXACT_CODES, CLOSE, GOLDEN_CODES = "codes equal", "difference", "codes equal to the golden files"
EAGER_CODES = "codes equal to the same device's eager run"
RULED_CODES = "codes equal to a CPU run by the operators' dtype rules"


@dataclass(frozen=True, slots=True)
class Module:
    """What is compared: its comparator and tolerance per dtype, and the checkpoints it runs with."""

    name: str
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    compared: dict[str, tuple[str, float]]  # dtype -> comparator, largest difference allowed (0: equal)
    attention: bool = True  # whether it takes an attention op


# A tolerance bounds every |difference| / (1 + |reference|), and a tenth of it bounds their mean. bfloat16 keeps 8 bits:
# one rounding of a value around 1 is 4e-3, and whole stacks of layers are compared with float32 here. About half of
# each bfloat16 bound is used on a CPU.
MODULES = (
    Module("attention op", ("16/8 heads of 128",), ALL_BATCHES, {FLOAT32: (CLOSE, 1e-5), BFLOAT16: (CLOSE, 1e-2)}),
    Module(
        "predictor frame",
        ("custom_voice-tiny", "custom_voice-tiny-0.6B"),
        ALL_BATCHES,
        {FLOAT32: (EXACT_CODES, 0.0), BFLOAT16: (CLOSE, 0.2)},
    ),
    Module(
        "talker step",
        ("custom_voice-tiny",),
        ALL_BATCHES,
        {FLOAT32: (CLOSE, 1e-4), BFLOAT16: (CLOSE, 0.2)},
    ),
    Module(
        "codec chunk",
        ("custom_voice-tiny",),
        ALL_BATCHES,
        {FLOAT32: (CLOSE, 1e-4), BFLOAT16: (CLOSE, 0.15)},
        attention=False,
    ),
    Module(
        "local codes",
        ("custom_voice-tiny", "custom_voice-tiny-0.6B", "voice_design-tiny"),
        (1,),
        {FLOAT32: (GOLDEN_CODES, 0.0)},
    ),
)
SERVED = "served codes"


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison. ``graphs``: "eager", "graph", or for a server the name of vLLM's graph mode."""

    module: str
    variant: str
    device: str
    attention: str
    graphs: str
    dtype: str
    batch: int
    comparator: str
    tolerance: float

    @property
    def id(self) -> str:
        """Name in results and on the command line."""
        parts = (self.device, self.module, self.variant, self.attention, self.graphs, self.dtype, f"batch {self.batch}")
        return " / ".join(parts)

    @property
    def bucket(self) -> int:
        """The captured batch size that holds the rows."""
        return next(size for size in BUCKETS if size >= self.batch)

    @property
    def is_reference(self) -> bool:
        """Whether this is what the others are compared with, so that comparing it would prove nothing."""
        path = (self.device, self.attention, self.graphs, self.dtype, self.batch)
        return path == ("cpu", "sdpa", "eager", FLOAT32, 1) and self.module not in (SERVED, "local codes")


@dataclass(frozen=True, slots=True)
class Served:
    """Codes by ``vllm serve``: one server per graph mode, then 1, 3 and 8 requests at once."""

    device: str
    variants: tuple[str, ...]
    attention: str  # of the code predictor; the talker's is vLLM's own
    modes: tuple[str, ...]
    dtype: str
    batches: tuple[int, ...]
    comparator: str


_MODES = ("eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_CAPTURED = _MODES[1:]
_HEADS128 = ("custom_voice-tiny-heads128",)  # vllm-ascend's packed attention takes heads of 128
_GOLDEN_VARIANTS = ("custom_voice-tiny", "custom_voice-tiny-0.6B", "voice_design-tiny")
SERVERS = (
    Served("cpu", _GOLDEN_VARIANTS, "sdpa", ("eager",), FLOAT32, ALL_BATCHES, EXACT_CODES),
    Served("cpu", ("custom_voice-tiny-0.6B",), "sdpa", ("graph",), FLOAT32, ALL_BATCHES, EXACT_CODES),
    Served("cuda", _GOLDEN_VARIANTS, "sdpa", ("eager", "FULL_AND_PIECEWISE"), FLOAT32, ALL_BATCHES, EXACT_CODES),
    Served("cuda", _GOLDEN_VARIANTS[:1], "sdpa", _CAPTURED, BFLOAT16, (1,), EAGER_CODES),
    # Only the emulator can be told to take float32 in the inference attention of vllm-ascend; a device refuses it.
    Served(EMULATED, _HEADS128, "npu_fusion_v3", _MODES, FLOAT32, ALL_BATCHES, EXACT_CODES),
    Served(EMULATED, _HEADS128, "npu_fusion_v3", _MODES, BFLOAT16, ALL_BATCHES, RULED_CODES),
    Served("npu", _HEADS128, "npu_fusion_v3", _CAPTURED, BFLOAT16, (1,), EAGER_CODES),
)


def cells() -> list[Cell]:
    """Every cell, in the order of the tables."""
    return [*_component_cells(), *_served_cells()]


def _component_cells() -> Iterator[Cell]:
    for device in DEVICES:
        for module in MODULES:
            for variant in module.variants:
                for dtype, (comparator, tolerance) in module.compared.items():
                    ops = [op for op, taken in ATTENTION[device].items() if dtype in taken]
                    for attention in ops if module.attention else ["own"]:
                        for graphs in ("eager", "graph"):
                            for batch in module.batches:
                                yield Cell(
                                    module.name, variant, device, attention, graphs, dtype, batch, comparator, tolerance
                                )


def _served_cells() -> Iterator[Cell]:
    for served in SERVERS:
        for variant in served.variants:
            for mode in served.modes:
                for batch in served.batches:
                    yield Cell(
                        SERVED, variant, served.device, served.attention, mode, served.dtype, batch,
                        served.comparator, 0.0,
                    )  # fmt: skip
