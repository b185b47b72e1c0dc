"""The golden data of voice cloning: what the encoders of the official package hear, and what it says with that.

Per Base checkpoint: one file of reference codes and speaker embeddings for recordings of many lengths under
``encoders/``, and one per cloned request under ``clones/``. The recordings are synthetic: length and seed give them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from golden_recording import (
    GOLDEN,
    LOG,
    Recorder,
    compare,
    examine,
    load_official,
    provenance,
    speech_arrays,
    store,
)

VOICE_SIZES = ("tiny", "tiny-0.6B")
SAMPLE_RATE_HZ = 24_000
# Around one frame, 1 s, 1.25 s, 3 s and a bit, 5 s, 9.9 s; and 13 s, which is longer than the encoder's inert window.
LENGTHS = (1_919, 1_920, 1_921, 24_000, 30_000, 72_007, 120_001, 237_600, 312_000)
MEL_LENGTH = 30_000
RESAMPLED = (8_000, 44_100, 48_000)  # rates that a recording of 6,000 samples is said to have
REQUEST_FIELDS = ("text", "language", "ref_text", "x_vector_only", "text_mode", "ref_samples", "ref_seed")

SHORT = "Hello world."
SENTENCE = "I'm on YouTube with 3 iPhones at the café, it's good!!"
LONG = "When the rain had stopped, the two of them walked along the river, past the old mill and the bridge."
CHINESE = "你好。今天天气不错。"
SPOKEN = "Good morning."


@dataclass(frozen=True, slots=True)
class CloneCase:
    """One request in a cloned voice; ``finish`` is what must end it, ``frames`` the limit."""

    name: str
    text: str
    ref_text: str | None
    text_mode: str
    language: str = "auto"
    ref_samples: int = 72_007
    ref_seed: int = 0
    frames: int = 24
    finish: str = "length"

    @property
    def x_vector_only(self) -> bool:
        """Whether the speaker embedding alone carries the voice."""
        return self.ref_text is None


CASES = (
    CloneCase("icl-whole", SENTENCE, SPOKEN, "whole", "english"),
    CloneCase("icl-whole-chinese", CHINESE, SPOKEN, "whole", "chinese", ref_samples=30_000, ref_seed=1),
    CloneCase("icl-streaming-long-text", LONG, SPOKEN, "streaming", ref_samples=1_921, ref_seed=2),
    CloneCase("icl-streaming-long-reference", SHORT, SPOKEN, "streaming", "english", ref_samples=120_001),
    CloneCase("icl-stop", SHORT, SENTENCE, "streaming", ref_samples=24_000, ref_seed=3, frames=80, finish="stop"),
    CloneCase("x-vector-whole", SENTENCE, None, "whole", "english", ref_seed=4),
    CloneCase("x-vector-streaming", LONG, None, "streaming", ref_seed=1),
)


def run_voices(size: str, *, only: str, check: bool, work: Path) -> None:
    """Make the golden files of one Base checkpoint, writing it once per way to end."""
    from tests.parity.checkpoints import TinyCheckpoint, weight_checksums, write_checkpoint

    for endless in (True, False):
        # Another seed per size: both have encoders of the same form.
        spec = TinyCheckpoint("base", size, seed=2 * VOICE_SIZES.index(size), end_of_speech=not endless)
        cases = [case for case in CASES if (case.finish == "length") == endless]
        cases = [case for case in cases if only in f"{spec.name}/clones/{case.name}"]
        encoders = endless and only in f"{spec.name}/encoders/references"
        if not cases and not encoders:
            continue
        directory = write_checkpoint(spec, work / spec.key)
        metadata = provenance(spec.to_json(), json.dumps(weight_checksums(directory), sort_keys=True))
        official = load_official(directory)
        LOG.info("%s", spec.key)
        if encoders:
            keep(GOLDEN / spec.name / "encoders" / "references.safetensors", *listen(official), metadata, check=check)
        recorder = Recorder(official.model)
        for case in cases:
            arrays, figures = run_clone(official, recorder, case)
            keep(GOLDEN / spec.name / "clones" / f"{case.name}.safetensors", arrays, figures, metadata, check=check)


def keep(path: Path, arrays: dict[str, Any], figures: dict[str, str], metadata: dict[str, str], *, check: bool) -> None:
    """Store a golden file, or compare with the stored one."""
    if check:
        compare(path, arrays)
    else:
        store(path, arrays, {**metadata, **figures})


def listen(official: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return codes and embedding of recordings of all lengths, one mel spectrogram, and resampled audio."""
    import librosa
    import numpy as np

    from tests.parity.reference_audio import audio_checksum, reference_audio

    arrays: dict[str, Any] = {}
    gap = QuantizerGap(official.model.speech_tokenizer.model.encoder.quantizer)
    for seed, samples in enumerate(LENGTHS):
        audio = reference_audio(samples, seed)
        arrays[f"codes_{samples}"] = official.model.speech_tokenizer.encode(audio, sr=SAMPLE_RATE_HZ).audio_codes[0]
        arrays[f"embedding_{samples}"] = official.model.extract_speaker_embedding(audio=audio, sr=SAMPLE_RATE_HZ)
        arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        distinct = len(np.unique(arrays[f"codes_{samples}"]))
        LOG.info("  %7d samples: %3d distinct codes; narrowest gap so far %.1e", samples, distinct, gap.narrowest)
    if gap.narrowest < 1e-5:
        raise SystemExit(f"two codebook entries differ by {gap.narrowest:.1e} in their distance; choose other seeds")
    arrays[f"mel_{MEL_LENGTH}"] = mel_of(reference_audio(MEL_LENGTH, LENGTHS.index(MEL_LENGTH)))
    for rate_hz in RESAMPLED:
        audio = reference_audio(6_000, seed=0)
        arrays[f"resampled_{rate_hz}"] = librosa.resample(audio, orig_sr=rate_hz, target_sr=SAMPLE_RATE_HZ)
    sums = {str(samples): audio_checksum(reference_audio(samples, seed)) for seed, samples in enumerate(LENGTHS)}
    figures = {
        "lengths": json.dumps(LENGTHS),
        "audio_sha256": json.dumps(sums, sort_keys=True),
        "narrowest_distance_gap": f"{gap.narrowest:.3e}",
    }
    return arrays, figures


class QuantizerGap:
    """Listens to the official quantizer: how much nearer the chosen entry was than the next, at the least."""

    def __init__(self, quantizer: Any) -> None:
        self.narrowest = float("inf")
        for module in quantizer.modules():
            if hasattr(module, "cluster_usage"):
                self._wrap(module)

    def _wrap(self, codebook: Any) -> None:
        import torch

        inner = codebook.quantize

        def quantize(hidden: Any) -> Any:
            nearest = torch.cdist(hidden.double(), codebook.embed.double()).topk(2, largest=False).values
            self.narrowest = min(self.narrowest, float((nearest[:, 1] - nearest[:, 0]).min()))
            return inner(hidden)

        codebook.quantize = quantize


def mel_of(audio: Any) -> Any:
    """Return the log-mel frames that the official speaker encoder is given, ``[frames, 128]``."""
    import torch
    from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram

    bands = mel_spectrogram(
        torch.from_numpy(audio)[None],
        n_fft=1024,
        num_mels=128,
        sampling_rate=SAMPLE_RATE_HZ,
        hop_size=256,
        win_size=1024,
        fmin=0,
        fmax=12_000,
    )
    return bands[0].T.contiguous().numpy()


def run_clone(official: Any, recorder: Recorder, case: CloneCase) -> tuple[dict[str, Any], dict[str, str]]:
    """Run one cloned request greedily; return the arrays of its golden file and the figures of its metadata."""
    import numpy as np

    from tests.parity.reference_audio import audio_checksum, reference_audio

    audio = reference_audio(case.ref_samples, case.ref_seed)
    waveforms, _ = official.generate_voice_clone(
        case.text,
        language=case.language,
        ref_audio=(audio, SAMPLE_RATE_HZ),
        ref_text=case.ref_text,
        x_vector_only_mode=case.x_vector_only,
        non_streaming_mode=case.text_mode == "whole",
        do_sample=False,
        subtalker_dosample=False,
        max_new_tokens=case.frames + 1,  # the last token of the official loop is never completed to a frame
    )
    arrays = speech_arrays(recorder, waveforms[0])
    prompt = recorder.inputs["voice_clone_prompt"]
    arrays["speaker_embedding"] = np.ascontiguousarray(prompt["ref_spk_embedding"][0].numpy())
    if not case.x_vector_only:
        arrays["ref_codes"] = np.ascontiguousarray(prompt["ref_code"][0].numpy().astype(np.int64))
        arrays["ref_ids"] = np.ascontiguousarray(recorder.inputs["ref_ids"][0][0].numpy().astype(np.int64))
    stop_id = official.model.config.talker_config.codec_eos_token_id
    figures = examine(case, arrays, recorder, stop_id)
    if len(arrays["waveform"]) != 1_920 * len(arrays["codes"]):
        raise SystemExit(f"{case.name}: the official cut of the reference is off by a sample; choose another limit")
    described = {name: getattr(case, name) for name in REQUEST_FIELDS} | {"max_frames": case.frames}
    figures["request"] = json.dumps(described, ensure_ascii=False, sort_keys=True)
    figures["audio_sha256"] = audio_checksum(audio)
    return arrays, figures
