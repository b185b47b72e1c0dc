"""Inventories against the published files' numbers, written checkpoints against their own checks, and repeatability."""

from __future__ import annotations

import hashlib
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

from qwen3tts_hw.checkpoint.initialisation import SpeechEnd, draw, round_to_bfloat16
from qwen3tts_hw.checkpoint.inventory import codec_tensors, is_unused, main_tensors
from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_TOKENS, SIZES, compose
from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.checkpoint.writer import make_checkpoint
from qwen3tts_hw.config import MODEL_VARIANTS
from qwen3tts_hw.errors import CheckpointError, UnsupportedError
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from tests.unit.published_configs import SUBSET, published_config, published_files

TINY = [("custom_voice", "tiny"), ("custom_voice", "tiny-0.6B"), ("voice_design", "tiny"), ("base", "tiny")]


def parameters(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def bytes_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _tidy(tmp_path):
    yield
    shutil.rmtree(tmp_path)  # megabytes that pytest would keep for three runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), variant="custom_voice", size="tiny")


class TestInventory:
    @pytest.mark.parametrize(
        ("variant", "size", "tensors", "total"),
        [
            ("base", "0.6B", 478, 914_643_008),
            ("custom_voice", "0.6B", 402, 905_788_672),
            ("base", "1.7B", 480, 1_928_677_440),
            ("custom_voice", "1.7B", 404, 1_916_676_352),
            ("voice_design", "1.7B", 404, 1_916_676_352),
        ],
    )
    def test_published_models(self, variant, size, tensors, total):
        shapes = main_tensors(published_config(variant, size))
        assert (len(shapes), parameters(shapes)) == (tensors, total)

    def test_published_codec(self):
        shapes = codec_tensors(published_files()["speech_tokenizer/config.json"])
        assert (len(shapes), parameters(shapes)) == (496, 170_557_441)

    def test_shapes_that_are_easily_confused(self):
        shapes = main_tensors(published_config("custom_voice", "0.6B"))
        assert shapes["talker.model.layers.0.self_attn.q_proj.weight"] == (2048, 1024)
        assert shapes["talker.text_projection.linear_fc2.weight"] == (1024, 2048)
        assert "talker.code_predictor.small_to_mtp_projection.weight" not in shapes
        shapes = main_tensors(published_config("custom_voice", "1.7B"))
        assert shapes["talker.code_predictor.small_to_mtp_projection.weight"] == (1024, 2048)
        assert shapes["talker.code_predictor.model.codec_embedding.14.weight"] == (2048, 2048)
        assert shapes["talker.code_predictor.lm_head.14.weight"] == (2048, 1024)

    def test_what_the_codec_leaves_alone(self):
        names = [name for name in codec_tensors(published_files()["speech_tokenizer/config.json"]) if is_unused(name)]
        acoustic = "encoder.quantizer.acoustic_residual_vector_quantizer."
        assert len(names) == 68
        assert "decoder.quantizer.rvq_rest.input_proj.weight" in names
        assert f"{acoustic}output_proj.weight" in names
        assert f"{acoustic}layers.15.codebook.embed_sum" in names
        assert f"{acoustic}layers.14.codebook.embed_sum" not in names
        assert f"{acoustic}layers.14.codebook.initialized" in names
        assert not any("transformer" in name or "decoder.decoder" in name for name in names)


class TestPublished:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("variant", MODEL_VARIANTS)
    def test_every_form_parses_or_is_refused(self, variant, size):
        if variant == "voice_design" and size.endswith("0.6B"):
            with pytest.raises(UnsupportedError, match="no voice_design checkpoint of size"):
                published_config(variant, size)
            return
        config = published_config(variant, size)
        assert config.variant == variant
        assert config.has_projection == (not size.endswith("0.6B"))
        assert config.accepts_instruct == (variant != "base" and not size.endswith("0.6B"))
        assert config.speaker_embedding_size == (config.talker.hidden_size if variant == "base" else None)
        assert len(config.speakers) == (9 if variant == "custom_voice" else 0)
        assert len(config.language_ids) == (12 if variant == "custom_voice" else 10)
        rope = config.raw["talker_config"]["rope_scaling"]
        assert 2 * sum(rope["mrope_section"]) == config.talker.head_dim

    @pytest.mark.parametrize(("variant", "size"), [("custom", "tiny"), ("base", "7B"), ("base", "Tiny")])
    def test_unknown_names(self, variant, size):
        with pytest.raises(UnsupportedError, match="supported: "):
            compose(variant, size, PUBLISHED_TEXT_TOKENS, 151_936)


class TestWriter:
    @pytest.mark.parametrize(("variant", "size"), TINY)
    def test_written_checkpoints_pass_their_check(self, tmp_path, variant, size):
        checkpoint = open_checkpoint(make_checkpoint(tmp_path / "out", variant=variant, size=size))
        checkpoint.check()
        main, codec = dict(checkpoint.iter_main()), dict(checkpoint.iter_codec())
        assert {name: tuple(value.shape) for name, value in main.items()} == main_tensors(checkpoint.config)
        assert {name: tuple(value.shape) for name, value in codec.items()} == codec_tensors(checkpoint.config.raw_codec)
        assert all(
            value.dtype == torch.float32 and value.isfinite().all() for value in (*main.values(), *codec.values())
        )
        tokenizer = TextTokenizer.from_directory(checkpoint.directory)
        assert tokenizer.encode("assistant") == [checkpoint.config.text_tokens.assistant]

    def test_same_arguments_same_bytes(self, tmp_path, tiny):
        again = make_checkpoint(tmp_path / "again", variant="custom_voice", size="tiny")
        other = make_checkpoint(tmp_path / "other", variant="custom_voice", size="tiny", seed=1)
        assert bytes_of(again) == bytes_of(tiny)
        assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()
        assert (other / "config.json").read_bytes() == (tiny / "config.json").read_bytes()

    def test_progress_counts_every_byte(self, tmp_path):
        seen = []
        out = make_checkpoint(tmp_path / "out", variant="base", size="tiny", progress=lambda *step: seen.append(step))
        done, totals = zip(*seen, strict=True)
        assert list(done) == sorted(done)
        assert set(totals) == {done[-1]}
        assert done[-1] < sum(path.stat().st_size for path in out.rglob("*.safetensors")) < 1.01 * done[-1]
        assert not list(out.rglob("*.part"))

    def test_nothing_is_overwritten(self, tmp_path):
        (tmp_path / "config.json").write_text("mine", encoding="utf-8")
        with pytest.raises(CheckpointError, match="not an empty directory"):
            make_checkpoint(tmp_path, variant="base", size="tiny")
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    def test_nothing_is_written_for_a_form_that_does_not_exist(self, tmp_path):
        with pytest.raises(UnsupportedError):
            make_checkpoint(tmp_path / "out", variant="voice_design", size="0.6B")
        assert not (tmp_path / "out").exists()

    def test_given_tokenizer(self, tmp_path):
        out = make_checkpoint(tmp_path / "out", variant="custom_voice", size="tiny", tokenizer=SUBSET)
        config = open_checkpoint(out).config
        assert config.text_tokens == PUBLISHED_TEXT_TOKENS
        assert config.text_vocab_size == 151_936
        assert (out / "merges.txt").read_bytes() == (SUBSET / "merges.txt").read_bytes()

    def test_missing_tokenizer_leaves_no_checkpoint(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"lacks vocab\.json, merges\.txt, tokenizer_config\.json"):
            make_checkpoint(tmp_path / "out", variant="base", size="tiny", tokenizer=tmp_path)
        assert not (tmp_path / "out" / "config.json").exists()


class TestValues:
    def test_values_are_the_same_on_every_machine(self):
        values = np.concatenate(list(draw("talker.codec_head.weight", (64, 48), seed=3, bfloat16=False)))
        digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
        assert digest == "a7b12cbd79d97599bbc23b43e77df29ea97bf86a533610c6de271265c27cf637"

    def test_bfloat16_is_the_rounded_float32(self):
        name, shape = "talker.model.layers.0.mlp.up_proj.weight", (96, 32)
        exact = torch.from_numpy(np.concatenate(list(draw(name, shape, seed=0, bfloat16=False))))
        bits = np.concatenate(list(draw(name, shape, seed=0, bfloat16=True)))
        assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), exact.to(torch.bfloat16))

    def test_rounding_is_to_nearest_even(self):
        bits = np.random.RandomState(0).randint(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32)
        ties = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
        values = np.concatenate([bits, ties]).view(np.float32)
        values = np.ascontiguousarray(values[np.isfinite(values) & (np.abs(values) < 3e38)])
        expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(round_to_bfloat16(values), expected)

    def test_scales(self):
        def drawn(name, *shape):
            return np.concatenate(list(draw(name, shape, seed=0, bfloat16=False)))

        assert drawn("talker.model.layers.0.mlp.up_proj.weight", 400, 400).std() == pytest.approx(1.3 / 20, rel=0.02)
        assert drawn("talker.model.codec_embedding.weight", 400, 400).std() == pytest.approx(0.7, rel=0.02)
        assert drawn("talker.model.norm.weight", 40_000).mean() == pytest.approx(1.0, abs=0.01)
        assert drawn("decoder.quantizer.rvq_rest.vq.layers.3._codebook.cluster_usage", 40_000).min() >= 1.0
        assert drawn("decoder.decoder.1.block.1.conv.weight", 96, 48, 16).std() == pytest.approx(
            0.9 / math.sqrt(2 * 96), rel=0.02
        )

    def test_published_sizes_store_bfloat16_models_and_float32_codecs(self, tmp_path, monkeypatch):
        # The real sizes take gigabytes; the tiny numbers under another storage rule show the same path.
        monkeypatch.setattr("qwen3tts_hw.checkpoint.writer.is_small", lambda size: False)
        monkeypatch.setattr("qwen3tts_hw.checkpoint.writer.PUBLISHED_TEXT_VOCAB_SIZE", 0)
        out = make_checkpoint(tmp_path / "out", variant="base", size="tiny", end_of_speech=False)
        checkpoint = open_checkpoint(out)
        checkpoint.check()
        assert {value.dtype for _, value in checkpoint.iter_main()} == {torch.bfloat16}
        assert {value.dtype for _, value in checkpoint.iter_codec()} == {torch.float32}
        head = dict(checkpoint.iter_main())["talker.codec_head.weight"]
        assert head[2150, 0] == -4096.0


class TestSpeechEnd:
    def test_never_wins_when_disabled(self, tmp_path):
        """Channel 0 of the residual stream is a positive constant, and end of speech is far below all other logits."""
        out = make_checkpoint(tmp_path / "out", variant="custom_voice", size="tiny", end_of_speech=False)
        with safe_open(out / "model.safetensors", "np") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        writers = [name for name in weights if name.startswith("talker.model.layers.") and _writes_to_stream(name)]
        assert len(writers) == 2 * 3
        assert all(not weights[name][0].any() for name in writers)
        embeddings = [name for name in weights if "codec_embedding" in name]
        assert len(embeddings) == 16
        assert all(not weights[name][:, 0].any() for name in embeddings)
        assert not weights["talker.text_projection.linear_fc2.weight"][0].any()
        constant = weights["talker.text_projection.linear_fc2.bias"][0]
        assert constant == 2.0
        stream = np.random.RandomState(0).standard_normal((2000, 64)) * np.linspace(0.1, 30.0, 2000)[:, None]
        stream[:, 0] = constant
        normed = stream / np.sqrt((stream**2).mean(-1, keepdims=True)) * weights["talker.model.norm.weight"]
        logits = normed @ weights["talker.codec_head.weight"].T
        assert (logits[:, 2150] < np.delete(logits, 2150, axis=1).min(-1) - 50).all()

    def test_is_likelier_when_enabled(self, tiny):
        with safe_open(tiny / "model.safetensors", "np") as file:
            lengths = np.linalg.norm(file.get_tensor("talker.codec_head.weight"), axis=1)
        assert lengths.argmax() == 2150
        assert lengths[2150] > 1.5 * np.median(lengths)

    @pytest.mark.parametrize("enabled", [True, False])
    def test_concerns_exactly_what_it_edits(self, enabled):
        config = published_config("base", "tiny")
        end = SpeechEnd(config, enabled=enabled)
        for name, shape in main_tensors(config).items():
            if name != "talker.model.text_embedding.weight":
                assert end.edit(name, np.ones(shape, np.float32)) == end.concerns(name), name


def _writes_to_stream(name):
    return name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))


def test_interrupted_writing_leaves_no_weights(tmp_path):
    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "out", variant="base", size="tiny", progress=stop)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path / "out").check()
