"""How long does the codec decoder take per frame, and how far is that from what the device could do at best?

Metric: milliseconds of one ``decode_step`` for R streams with F new frames each, and the same divided by R * F
("ms per frame and row", ``frame_row_ms``). A frame lasts 80 ms, so 80 / ``frame_row_ms`` streams keep up with real
time. The rows named one_pass decode a whole sequence of F frames without state kept.

``--form`` plain, or the fused form in one of its precisions. ``error_max`` and ``error_rms`` compare a stream of
``ERROR_FRAMES`` frames, cut as the audio pump cuts it, with the plain form's one pass in float32 on the same device:
largest absolute difference of samples in [-1, 1], and root mean square as a share of the signal's deviation.

``floor_ms`` is the larger of two times measured in the same run: all arithmetic of the step at the rate of one large
matrix product in the same dtype, and all weights, and the state once read and once written, at the rate of a device
copy. ``times_floor`` is the median over the floor; 1 cannot be beaten without doing less.

Weights are random: time does not depend on them. Example:

    python -m benchmarks.bench_codec --size 1.7B --form medium --rows 1 8 32 64 --frames 1 4 8 --graphs auto
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Timing, measure, report
from qwen3tts_hw import codec_kernels, graph_wrappers
from qwen3tts_hw.backends import Backend, resolve
from qwen3tts_hw.checkpoint import initialisation, published
from qwen3tts_hw.codec import CodecDecoder
from qwen3tts_hw.config import CODEC_SUBFOLDER, CodecDecoderConfig, parse_codec_config
from qwen3tts_hw.graph_wrappers import InputSpec
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RATE_MATRIX = {"cpu": 1_024}  # a device that is not listed is given enough to fill it
RATE_MATRIX_DEFAULT = 8_192
RATE_COPY_BYTES = 1 << 28
ERROR_CHUNKS = (1, 2, 4, 8, 8, 8, 8, 1)
ERROR_FRAMES = sum(ERROR_CHUNKS)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches on the two plainest operations."""

    flops_per_ms: float
    bytes_per_ms: float

    @classmethod
    def of(cls, backend: Backend, dtype: torch.dtype) -> Rates:
        """Measure a square matrix product and a copy."""
        size = RATE_MATRIX.get(backend.device.type, RATE_MATRIX_DEFAULT)
        matrix = torch.randn(size, size, device=backend.device, dtype=dtype)
        block = torch.empty(RATE_COPY_BYTES, dtype=torch.uint8, device=backend.device)
        target = torch.empty_like(block)
        product = measure(lambda: matrix @ matrix, backend, 10)
        copy = measure(lambda: target.copy_(block), backend, 10)
        return cls(2 * size**3 / product.median_ms, 2 * RATE_COPY_BYTES / copy.median_ms)

    def floor_ms(self, flops: int, moved_bytes: int) -> float:
        """Least time for this much arithmetic and traffic if both overlap perfectly."""
        return max(flops / self.flops_per_ms, moved_bytes / self.bytes_per_ms)


def codec_config(size: str) -> CodecDecoderConfig:
    """Return the codec sizes of a checkpoint form; all published forms share one codec."""
    files = published.compose(
        "custom_voice", size, published.PUBLISHED_TEXT_TOKENS, published.PUBLISHED_TEXT_VOCAB_SIZE
    )
    return parse_codec_config(files[f"{CODEC_SUBFOLDER}/config.json"])


def random_decoder(config: CodecDecoderConfig, backend: Backend, dtype: torch.dtype) -> CodecDecoder:
    """Build a decoder with the random weights that the checkpoint writer would give it."""
    decoder = CodecDecoder(config, backend.device, dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, shape in decoder.expected_tensors().items():
            pieces = list(initialisation.draw(name, shape, seed=0, bfloat16=False))
            yield name, torch.from_numpy(np.concatenate(pieces)).view(shape).to(backend.device)

    decoder.load_weights(tensors())
    backend.prepare_weights(decoder)
    return decoder


def random_codes(rows: int, frames: int, backend: Backend) -> Tensor:
    """Draw codes ``[R, 16, F]`` on the device."""
    return torch.randint(0, CODEBOOK_SIZE, (rows, NUM_CODEBOOKS, frames)).to(backend.device)


def errors(decoder: CodecDecoder, exact: CodecDecoder, backend: Backend) -> dict[str, float]:
    """Compare a stream of ``decoder`` with the one pass of ``exact``, the plain form in float32."""
    codes, state = random_codes(2, ERROR_FRAMES, backend), decoder.new_state(2)
    slots = torch.arange(2, device=backend.device)
    parts = [decoder.decode_step(part, state, slots) for part in codes.split(ERROR_CHUNKS, 2)]
    expected = exact.decode(codes)
    difference = torch.cat(parts, 1) - expected
    return {
        "error_max": difference.abs().max().item(),
        "error_rms": (difference.square().mean().sqrt() / expected.std()).item(),
    }


class Bench:
    """One decoder on one device, timed for several shapes."""

    def __init__(self, decoder: CodecDecoder, backend: Backend, *, repeats: int, graphs: str) -> None:
        self.decoder, self.backend, self.repeats = decoder, backend, repeats
        self.wrap = graph_wrappers.create(graphs, backend)
        self.rates = Rates.of(backend, decoder.dtype)
        self.weight_bytes = sum(p.nbytes for n, p in decoder.named_parameters() if n != "codebooks.table")

    def steps(self, rows: int, frames: int) -> dict[str, object]:
        """Time ``decode_step`` through the graph wrapper."""
        state = self.decoder.new_state(rows + 1)  # the last slot is for padding
        step = self.wrap(
            lambda codes, slots: self.decoder.decode_step(codes, state, slots),
            buckets=[rows],
            inputs=[
                InputSpec("codes", (NUM_CODEBOOKS, frames), torch.int64),
                InputSpec("slots", (), torch.int64, pad_value=rows),
            ],
            name="codec step",
        )
        step.capture()
        codes, slots = random_codes(rows, frames, self.backend), torch.arange(rows, device=self.backend.device)
        with FlopCounterMode(display=False) as counter:
            self.decoder.decode(codes)  # the plain form, for the counter sees no operations inside kernels
        timing = measure(lambda: step(codes, slots), self.backend, self.repeats)
        moved = self.weight_bytes + 2 * rows * state.bytes_per_slot
        return self._row(
            f"step ({step.mode})", rows, frames, timing, self.rates.floor_ms(counter.get_total_flops(), moved)
        )

    def one_pass(self, frames: int) -> dict[str, object]:
        """Time ``decode`` of one sequence."""
        codes = random_codes(1, frames, self.backend)
        with FlopCounterMode(display=False) as counter:
            self.decoder.decode(codes)
        timing = measure(lambda: self.decoder.decode(codes), self.backend, max(3, self.repeats // 4), warmup=2)
        floor = self.rates.floor_ms(counter.get_total_flops(), self.weight_bytes)
        return self._row("one_pass", 1, frames, timing, floor)

    def _row(self, what: str, rows: int, frames: int, timing: Timing, floor_ms: float) -> dict[str, object]:
        return {
            "what": what,
            "rows": rows,
            "frames": frames,
            "call": timing,
            "frame_row_ms": timing.median_ms / (rows * frames),
            "floor_ms": floor_ms,
            "times_floor": timing.median_ms / floor_ms,
        }


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "cuda", "npu"])
    parser.add_argument("--size", default="tiny", choices=published.SIZES)
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--form", default="plain", choices=["plain", *codec_kernels.PRECISIONS])
    parser.add_argument("--graphs", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--one-pass-frames", type=int, nargs="*", default=[100])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch on the CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    backend = resolve(options.backend)
    backend.prepare_process()
    config = codec_config(options.size)
    decoder = random_decoder(config, backend, DTYPES[options.dtype])
    if options.form != "plain":
        form = codec_kernels.create("fused", backend, precision=options.form, dtype=options.dtype)
        assert form is not None
        decoder.use(form)
    exact = decoder if options.dtype == "float32" else random_decoder(config, backend, torch.float32)
    found = errors(decoder, exact, backend)
    bench = Bench(decoder, backend, repeats=options.repeats, graphs=options.graphs)
    rows = [bench.steps(count, frames) for frames in options.frames for count in options.rows]
    rows += [bench.one_pass(frames) for frames in options.one_pass_frames]
    rows = [{**row, **found} if row["what"] != "one_pass" else row for row in rows]
    extra = {
        "device": backend.describe(),
        "settings": vars(options),
        "threads": torch.get_num_threads(),
        "matmul_tflops": bench.rates.flops_per_ms / 1e9,
        "copy_gb_per_s": bench.rates.bytes_per_ms / 1e6,
        "state_bytes_per_slot": decoder.new_state(1).bytes_per_slot,
        "weight_bytes": bench.weight_bytes,
    }
    report(f"codec decoder, {options.size}, {options.dtype}, {decoder.form}", rows, extra)


if __name__ == "__main__":
    main()
