"""The command line, called in this process: what it writes, and one sentence with exit code 2 for a user's error."""

from __future__ import annotations

import json
import subprocess
import sys
import wave

import numpy as np
import pytest
import soundfile

from qwen3tts_hw import backends
from qwen3tts_hw.backends.cpu import CpuBackend
from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.cli import main
from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from tests.parity.reference_audio import reference_audio


@pytest.fixture
def endless(tiny_checkpoint):
    return tiny_checkpoint(end_of_speech=False)


@pytest.fixture
def speak(endless, tmp_path, capsys):
    """Synthesize into ``tmp_path``; return codes, samples and what was printed."""

    def call(*options):
        out, codes = tmp_path / "out.wav", tmp_path / "out.codes"
        arguments = ["--model", endless, "--text", "Good morning.", "--voice", "Ryan", "--out", out, "--codes", codes]
        assert main(["synthesize", *map(str, (*arguments, *options))]) == 0
        with wave.open(str(out)) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return np.load(codes), samples, capsys.readouterr().out

    return call


@pytest.fixture
def error_of(capsys):
    """Run a command that must be refused; return its one sentence."""

    def call(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return call


class TestSynthesize:
    def test_greedy_codes_and_audio(self, speak):
        codes, samples, printed = speak("--greedy", "--max-frames", "5")
        assert (codes.dtype, codes.shape) == (np.int64, (5, NUM_CODEBOOKS))
        assert codes.min() >= 0
        assert codes.max() < CODEBOOK_SIZE
        assert len(samples) == 5 * SAMPLES_PER_FRAME
        assert np.abs(samples.astype(int)).max() > 100
        assert "0.40 s of audio, 5 frames, finish reason length" in printed
        again, _, _ = speak("--greedy", "--max-frames", "3", "--seed", "77")
        assert (again == codes[:3]).all()

    def test_the_seed_decides(self, speak):
        first, _, printed = speak("--seed", "5", "--max-frames", "3")
        assert "seed 5," in printed
        assert (speak("--seed", "5", "--max-frames", "3", "--dtype", "float32", "--device", "cpu")[0] == first).all()
        assert (speak("--seed", "6", "--max-frames", "3")[0] != first).any()

    @pytest.mark.parametrize("frames", [1, 2, 9])
    def test_the_limit_is_a_number_of_frames(self, speak, frames):
        codes, samples, _ = speak("--max-frames", str(frames))
        assert len(codes) == frames
        assert len(samples) == frames * SAMPLES_PER_FRAME

    def test_a_fresh_seed_is_printed(self, speak):
        first, _, printed = speak("--max-frames", "2")
        seed = printed.partition("seed ")[2].partition(",")[0]
        assert (speak("--max-frames", "2", "--seed", seed)[0] == first).all()


class TestClonedVoices:
    @pytest.fixture
    def base(self, tiny_checkpoint):
        return tiny_checkpoint("base", end_of_speech=False)

    @pytest.fixture
    def recording(self, tmp_path):
        path = tmp_path / "reference.wav"
        soundfile.write(path, reference_audio(12_000), 24_000, subtype="PCM_16")
        return path

    @pytest.fixture
    def start(self, base, tmp_path):
        """The command but for its voice, with a folder of its own for saved voices."""
        out = ["--out", tmp_path / "x.wav", "--codes", tmp_path / "x.npy", "--voices-dir", tmp_path / "voices"]
        return ["synthesize", "--model", base, "--text", "Hi.", "--greedy", "--max-frames", "2", *out]

    @pytest.fixture
    def codes_of(self, start, tmp_path):
        def call(*options):
            assert main([str(argument) for argument in (*start, *options)]) == 0
            return np.load(tmp_path / "x.npy").tolist()

        return call

    def test_a_saved_voice_speaks_as_the_recording(self, codes_of, recording, capsys):
        given = ["--ref-audio", recording, "--ref-text", "Good morning."]
        first = codes_of(*given, "--save-voice", "anna")
        printed = capsys.readouterr().err
        assert "voice anna saved in" in printed
        assert "of it are not silent" in printed, "advice about a short recording"
        assert codes_of("--voice", "Anna") == first == codes_of(*given)

    def test_the_sound_alone(self, codes_of, recording):
        continued = codes_of("--ref-audio", recording, "--ref-text", "Good morning.", "--save-voice", "anna")
        alone = codes_of("--ref-audio", recording, "--x-vector-only")
        assert alone != continued
        assert codes_of("--voice", "anna", "--x-vector-only") == alone

    def test_errors(self, error_of, start, recording, tmp_path):
        assert error_of(*start).startswith("voice: ")
        assert error_of(*start, "--voice", "nobody").startswith("voice: unknown voice 'nobody'; registered: none")
        assert error_of(*start, "--ref-audio", recording).startswith("ref_text: ")
        assert error_of(*start, "--ref-audio", tmp_path / "none.wav", "--x-vector-only").startswith("--ref-audio: ")
        assert error_of(*start, "--ref-text", "Hi").startswith("--ref-audio: ")
        assert error_of(*start, "--voice", "a", "--ref-audio", recording).startswith("--voice: ")
        assert error_of(*start, "--ref-audio", recording, "--x-vector-only", "--save-voice", "../a").startswith(
            "name: "
        )
        (tmp_path / "text.wav").write_text("Hello.")
        assert error_of(*start, "--ref-audio", tmp_path / "text.wav", "--x-vector-only").startswith("ref_audio: ")
        assert not (tmp_path / "voices").exists()

    @pytest.mark.parametrize("option", [["--ref-audio", "a.wav"], ["--ref-text", "a"], ["--x-vector-only"]])
    def test_other_checkpoints(self, error_of, endless, tmp_path, option):
        start = ["synthesize", "--model", endless, "--text", "Hi", "--out", tmp_path / "x.wav", "--voice", "ryan"]
        message = error_of(*start, *option)
        assert message.startswith(f"{option[0]}: ")
        assert "1.7B-Base" in message


@pytest.fixture
def no_weights(monkeypatch):
    """Fail if anything reads weights."""

    def load(*_, **__):
        raise AssertionError("the weights were read before the request was checked")

    monkeypatch.setattr(LocalEngine, "load", load)


@pytest.mark.usefixtures("no_weights")
class TestCheckedBeforeLoading:
    def test_fields(self, error_of, endless, tmp_path):
        start = ["synthesize", "--model", endless, "--out", tmp_path / "x.wav", "--text"]
        ryan = (*start, "Hi", "--voice", "ryan")
        assert error_of(*start, "Hi", "--voice", "nobody").startswith("voice: unknown voice 'nobody'; supported: ")
        assert error_of(*start, "Hi").startswith("voice: voice is missing")
        assert error_of(*start, " ", "--voice", "ryan").startswith("input: ")
        assert error_of(*ryan, "--language", "klingon").startswith("language: unknown language 'klingon'")
        assert error_of(*ryan, "--temperature", "0.001").startswith("temperature: ")
        assert error_of(*ryan, "--top-k", "9999").startswith("top_k: ")
        assert error_of(*ryan, "--top-p", "2").startswith("top_p: ")
        assert error_of(*ryan, "--repetition-penalty", "-1").startswith("repetition_penalty: ")
        assert error_of(*ryan, "--seed", "-1").startswith("seed: ")
        assert error_of(*ryan, "--max-frames", "0").startswith("max_new_tokens: ")

    def test_what_the_checkpoint_cannot_do(self, error_of, tiny_checkpoint, tmp_path):
        start = ["synthesize", "--out", tmp_path / "x.wav", "--text", "Hi", "--model"]
        small = tiny_checkpoint(size="tiny-0.6B")
        assert "does not follow instructions" in error_of(*start, small, "--voice", "ryan", "--instruct", "slowly")
        design = tiny_checkpoint("voice_design")
        assert error_of(*start, design).startswith("instructions: instructions is missing")
        assert "has no preset voices" in error_of(*start, design, "--instruct", "old", "--voice", "ryan")

    def test_sizes(self, error_of, endless, tmp_path, monkeypatch):
        start = ["synthesize", "--model", endless, "--out", tmp_path / "x.wav", "--voice", "ryan", "--text"]
        assert error_of(*start, "a" * 20_001).startswith("input: input has 20001 characters")
        monkeypatch.setenv("QWEN3TTS_MAX_TEXT_CHARS", "90000")
        message = error_of(*start, "y z " * 22_500)
        assert message.startswith("input: the prompt has ")
        assert message.endswith("the model has 32768 positions")

    def test_recordings(self, error_of, tiny_checkpoint, tmp_path):
        soundfile.write(tmp_path / "a.wav", reference_audio(12_000), 24_000, subtype="PCM_16")
        (tmp_path / "text.wav").write_text("Hello.")
        start = ["synthesize", "--model", tiny_checkpoint("base"), "--out", tmp_path / "x.wav", "--text", "Hi"]
        start += ["--voices-dir", tmp_path / "voices", "--x-vector-only", "--ref-audio"]
        assert error_of(*start, tmp_path / "none.wav").startswith("--ref-audio: ")
        assert error_of(*start, tmp_path / "text.wav").startswith("ref_audio: ")
        assert error_of(*start, tmp_path / "a.wav", "--save-voice", "../a").startswith("name: ")

    def test_a_request_for_a_recording_is_checked_too(self, tiny_checkpoint, tmp_path, capsys):
        soundfile.write(tmp_path / "a.wav", reference_audio(24_000), 24_000, subtype="PCM_16")
        command = ["synthesize", "--model", tiny_checkpoint("base"), "--out", tmp_path / "x.wav", "--text", "Hi"]
        command += ["--ref-audio", tmp_path / "a.wav", "--ref-text", "Good morning.", "--language", "klingon"]
        assert main([*map(str, command)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: language: unknown language")


class TestSynthesizeErrors:
    def test_requests(self, error_of, endless, tmp_path):
        start = ["synthesize", "--model", endless, "--out", tmp_path / "x.wav", "--text"]
        assert error_of(*start, "Hi", "--voice", "nobody").startswith("voice: unknown voice 'nobody'; supported: ")
        assert error_of(*start, "Hi").startswith("voice: voice is missing")
        assert error_of(*start, " ", "--voice", "ryan").startswith("input: ")
        assert error_of(*start, "Hi", "--voice", "ryan", "--max-frames", "0").startswith("max_new_tokens: ")
        assert error_of(*start, "Hi", "--voice", "ryan", "--seed", "-1").startswith("seed: ")
        assert error_of(*start, "Hi", "--voice", "ryan", "--top-p", "nan").startswith("top_p: ")
        greedy = error_of(*start, "Hi", "--voice", "ryan", "--greedy", "--temperature", "0.5")
        assert greedy == "temperature: --greedy and --temperature 0.5 contradict each other"
        assert not (tmp_path / "x.wav").exists()

    @pytest.mark.parametrize("model", ["missing", "Qwen/Qwen3-TTS", "file"])
    def test_no_checkpoint_directory(self, error_of, tmp_path, model):
        (tmp_path / "file").write_text("")
        message = error_of("synthesize", "--model", tmp_path / model, "--text", "Hi", "--out", tmp_path / "x.wav")
        assert "does not exist" in message

    def test_a_damaged_checkpoint(self, error_of, tmp_path, capsys):
        assert main(["make-checkpoint", str(tmp_path / "tiny")]) == 0
        capsys.readouterr()
        weights = tmp_path / "tiny" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
        command = ["synthesize", "--model", tmp_path / "tiny", "--text", "Hi", "--out", tmp_path / "x.wav"]
        command += ["--voice", "ryan"]
        assert "model.safetensors is cut short" in error_of(*command)
        (tmp_path / "tiny" / "config.json").write_text("{}")
        assert "model_type is None" in error_of(*command)

    @pytest.mark.parametrize("option", ["--out", "--codes"])
    def test_files_that_cannot_be_written(self, error_of, tmp_path, option):
        """Said before the model is loaded: there is none."""
        start = ["synthesize", "--model", "none", "--text", "Hi"]
        other = ["--out", tmp_path / "x.wav"] if option == "--codes" else []
        assert error_of(*start, *other, option, tmp_path / "no" / "x").endswith(
            f"folder {tmp_path / 'no'} does not exist"
        )
        assert error_of(*start, *other, option, tmp_path).endswith("the name of a file was expected")


class TestMakeCheckpoint:
    def test_writes_a_checkpoint(self, tmp_path, capsys):
        out = tmp_path / "tiny"
        assert main(["make-checkpoint", "--variant", "voice_design", "--seed", "4", str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        checkpoint = open_checkpoint(out)
        checkpoint.check()
        assert checkpoint.config.variant == "voice_design"

    def test_refusals(self, error_of, tmp_path, endless):
        assert "not an empty directory" in error_of("make-checkpoint", endless)
        (tmp_path / "file").write_text("")
        assert "cannot be made" in error_of("make-checkpoint", tmp_path / "file" / "tiny")
        assert "no voice_design" in error_of(
            "make-checkpoint", "--variant", "voice_design", "--size", "tiny-0.6B", tmp_path / "x"
        )
        assert error_of("make-checkpoint", "--tokenizer", tmp_path / "none", tmp_path / "y")


class TestDoctor:
    def test_json(self, capsys):
        assert main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert set(report) == {"versions", "devices", "would use", "settings"}
        assert report["versions"]["torch"] != "not installed"
        assert set(report["devices"]) == {"cpu", "cuda", "npu"}
        assert report["would use"].keys() == {
            "device", "dtype", "code predictor", "attention op", "weight layout", "frame step", "codec decoder"
        }  # fmt: skip
        assert all(" (" in line for line in report["would use"].values()), "each says why"

    def test_table(self, capsys):
        assert main(["doctor"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == "versions"
        assert any(line.split()[:2] == ["attention", "op"] for line in printed)
        assert any(line.split()[0] == "device_name" for line in printed), "a device's facts, one per line"

    def test_forms_and_why(self, capsys, monkeypatch):
        monkeypatch.setattr(backends, "resolve", lambda name="cpu": CpuBackend())

        def lines(**settings):
            for name, value in settings.items():
                monkeypatch.setenv(f"QWEN3TTS_{name.upper()}", value)
            assert main(["doctor", "--json"]) == 0
            return json.loads(capsys.readouterr().out)["would use"]

        found = lines()
        why = "the device has no compiler for the fused kernels"
        assert found["code predictor"] == f"plain (setting predictor=auto: {why})"
        assert found["codec decoder"] == f"plain, float32 (setting codec_kernels=auto: {why})"
        assert found["frame step"] == "eager (setting graphs=auto: the device has none)"
        assert found["weight layout"] == "plain (setting weight_layout=auto: the device has no other)"
        found = lines(predictor="plain", codec_dtype="bfloat16", attention_op="npu_reference")
        assert found["code predictor"] == "plain (setting predictor=plain)"
        assert found["attention op"] == "npu_reference (setting attention_op=npu_reference)"
        assert "bfloat16 (setting codec_kernels=auto: the fused form takes float32" in found["codec decoder"]

    @pytest.mark.parametrize("setting", ["predictor=fused", "codec_kernels=fused", "weight_layout=packed", "graphs=on"])
    def test_what_the_device_cannot_do_is_said(self, error_of, monkeypatch, setting):
        monkeypatch.setattr(backends, "resolve", lambda name="cpu": CpuBackend())
        name, _, value = setting.partition("=")
        monkeypatch.setenv(f"QWEN3TTS_{name.upper()}", value)
        assert "the cpu backend has n" in error_of("doctor")

    def test_settings_that_cannot_be_met(self, error_of, monkeypatch):
        monkeypatch.setenv("QWEN3TTS_GRAPHS", "maybe")
        assert error_of("doctor") == "graphs is 'maybe'; supported: auto, on, off, recording"


class TestParser:
    @pytest.mark.parametrize(
        "arguments",
        [[], ["speak"], ["synthesize"], ["make-checkpoint", "--size", "7B", "x"], ["doctor", "--yaml"]],
    )
    def test_usage_errors(self, arguments, capsys):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
        assert "usage: qwen3tts-hw" in capsys.readouterr().err

    def test_it_runs_as_a_module(self):
        """In a process of its own, which must not need torch to print its help."""
        run = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('qwen3tts_hw', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", run, "--help"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "synthesize" in done.stdout
