"""Parsing a checkpoint's configuration: the published forms, what may be missing, and every kind of damage."""

from __future__ import annotations

import copy
import json

import pytest

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.errors import ConfigError, Qwen3TTSError
from qwen3tts_hw.types import SamplingSpec
from tests.unit.published_configs import published_files

CONFIG, CODEC, GENERATION = "config.json", "speech_tokenizer/config.json", "generation_config.json"
REMOVED = object()
TALKER = "talker_config"
PREDICTOR = "talker_config.code_predictor_config"
DECODER = "decoder_config"


def changed(file, path, value, *, variant="custom_voice"):
    """The published files with one value replaced or removed; ``path`` is dotted."""
    files = copy.deepcopy(published_files(variant))
    *parents, key = path.split(".")
    section = files[file]
    for parent in parents:
        section = section[parent]
    if value is REMOVED:
        del section[key]
    else:
        section[key] = value
    return files


def parse(files):
    return ModelConfig.from_dicts(files[CONFIG], files[CODEC], files[GENERATION])


class TestPublished:
    def test_numbers_of_the_large_model(self):
        config = parse(published_files())
        assert (config.talker.hidden_size, config.talker.num_layers, config.talker.head_dim) == (2048, 28, 128)
        assert (config.predictor.hidden_size, config.predictor.num_layers) == (1024, 5)
        assert config.talker.rope_theta == config.predictor.rope_theta == 1e6
        assert (config.talker_vocab_size, config.max_positions, config.max_new_frames) == (3072, 32_768, 8192)
        assert (config.codec_tokens.pad, config.codec_tokens.bos, config.codec_tokens.eos) == (2148, 2149, 2150)
        assert config.sampling == SamplingSpec(seed=0)
        assert config.speaker_dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
        assert config.languages[0] == "auto"
        assert not any("dialect" in name for name in config.languages)

    def test_read_from_a_directory(self, tmp_path):
        for name, content in published_files().items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        assert ModelConfig.from_directory(tmp_path) == parse(published_files())
        (tmp_path / GENERATION).unlink()
        assert ModelConfig.from_directory(tmp_path) == parse(published_files())

    def test_names_are_lower_case(self):
        files = changed(CONFIG, f"{TALKER}.spk_id", {"Ryan": 3061, "Uncle_Fu": 3010})
        files[CONFIG][TALKER]["spk_is_dialect"] = {"Uncle_Fu": "beijing_dialect", "Ryan": False}
        config = parse(files)
        assert config.speakers == ("ryan", "uncle_fu")
        assert config.speaker_dialects == {"uncle_fu": "beijing_dialect"}

    def test_rope_theta_as_newer_tools_write_it(self):
        files = changed(CONFIG, f"{TALKER}.rope_theta", REMOVED)
        files[CONFIG][TALKER]["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
        assert parse(files).talker.rope_theta == 5e5

    @pytest.mark.parametrize("key", ["spk_id", "spk_is_dialect"])
    @pytest.mark.parametrize("value", [REMOVED, None, {}])
    def test_speaker_tables_may_be_missing(self, key, value):
        config = parse(changed(CONFIG, f"{TALKER}.{key}", value))
        assert (config.speakers if key == "spk_id" else config.speaker_dialects) in ((), {})

    def test_tokenizer_type_may_be_missing(self):
        parse(changed(CONFIG, "tokenizer_type", REMOVED))


class TestDamage:
    @pytest.mark.parametrize(
        ("file", "path"),
        [
            (CONFIG, TALKER),
            (CONFIG, PREDICTOR),
            (CONFIG, "tts_model_type"),
            (CONFIG, "im_start_token_id"),
            (CONFIG, "tts_eos_token_id"),
            *((CONFIG, f"{part}.{key}") for part in (TALKER, PREDICTOR) for key in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "rms_norm_eps", "rope_theta", "num_code_groups", "vocab_size",
            )),
            *((CONFIG, f"{TALKER}.{key}") for key in (
                "text_vocab_size", "text_hidden_size", "max_position_embeddings", "codec_pad_id", "codec_bos_id",
                "codec_eos_token_id", "codec_think_id", "codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id",
            )),
            (CODEC, "model_type"),
            (CODEC, DECODER),
            (CODEC, "output_sample_rate"),
            *((CODEC, f"{DECODER}.{key}") for key in (
                "codebook_dim", "codebook_size", "latent_dim", "decoder_dim", "hidden_size", "intermediate_size",
                "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                "rope_theta", "sliding_window", "upsample_rates", "upsampling_ratios", "num_quantizers",
            )),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("value", [REMOVED, None], ids=["removed", "null"])
    def test_missing_keys_are_named(self, file, path, value):
        with pytest.raises(ConfigError, match=f"^{file}: .*{path.rsplit('.', 1)[-1]} is missing"):
            parse(changed(file, path, value))

    @pytest.mark.parametrize("value", ["64", 1.5, True, [64], {"a": 1}, 0, -3])
    @pytest.mark.parametrize(
        ("file", "path"),
        [(CONFIG, f"{TALKER}.hidden_size"), (CONFIG, f"{PREDICTOR}.head_dim"), (CODEC, f"{DECODER}.latent_dim")],
    )
    def test_sizes_of_a_wrong_kind(self, file, path, value):
        with pytest.raises(ConfigError, match=rf"^{file}: .*{path.rsplit('.', 1)[-1]} must be "):
            parse(changed(file, path, value))

    @pytest.mark.parametrize(
        ("file", "path", "value"),
        [
            (CONFIG, TALKER, []),
            (CONFIG, PREDICTOR, "tiny"),
            (CONFIG, f"{TALKER}.spk_id", ["ryan"]),
            (CONFIG, f"{TALKER}.spk_id", 5),
            (CONFIG, f"{TALKER}.codec_language_id", "english"),
            (CONFIG, f"{TALKER}.spk_is_dialect", ["dylan"]),
            (CONFIG, f"{TALKER}.rope_parameters", [1e6]),
            (CODEC, DECODER, 7),
        ],
    )
    def test_sections_of_a_wrong_kind(self, file, path, value):
        with pytest.raises(ConfigError, match=f"{path.rsplit('.', 1)[-1]} must be an object"):
            parse(changed(file, path, value))

    @pytest.mark.parametrize(
        ("file", "path", "value", "message"),
        [
            (CONFIG, "model_type", "qwen3", "'qwen3'; this package serves 'qwen3_tts' only"),
            (CONFIG, "model_type", REMOVED, "model_type is None"),
            (CONFIG, "tokenizer_type", "qwen3_tts_tokenizer_25hz", "tokenizer_type is 'qwen3_tts_tokenizer_25hz'"),
            (CONFIG, "tts_model_type", "custom", "supported: custom_voice, voice_design, base"),
            (CONFIG, "tts_model_type", 3, "tts_model_type must be a string"),
            (CONFIG, f"{TALKER}.attention_bias", True, "attention_bias is true"),
            (CONFIG, f"{PREDICTOR}.hidden_act", "gelu", "hidden_act is 'gelu'"),
            (CONFIG, f"{TALKER}.rope_theta", "1e6", "rope_theta must be a number"),
            (CONFIG, f"{TALKER}.rope_theta", 0, "rope_theta is 0"),
            (CONFIG, f"{TALKER}.num_code_groups", 8, "num_code_groups is 8; the 12 Hz models have 16"),
            (CONFIG, f"{PREDICTOR}.num_code_groups", 32, "num_code_groups is 32"),
            (CONFIG, f"{PREDICTOR}.vocab_size", 1024, "vocab_size is 1024; the 12 Hz models have 2048"),
            (CONFIG, f"{TALKER}.num_key_value_heads", 7, "is not a multiple of num_key_value_heads 7"),
            (CONFIG, f"{PREDICTOR}.head_dim", 127, "head_dim 127 is odd"),
            (CONFIG, f"{TALKER}.codec_eos_token_id", 2047, "codec eos id 2047 is outside 2048..3071"),
            (CONFIG, f"{TALKER}.codec_think_id", 3072, "codec think id 3072 is outside"),
            (CONFIG, f"{TALKER}.vocab_size", 2050, "is outside 2048..2049"),
            (CONFIG, f"{TALKER}.spk_id", {"ryan": 4000}, r"spk_id\['ryan'\] is 4000"),
            (CONFIG, f"{TALKER}.spk_id", {"ryan": "3061"}, "ryan must be an integer"),
            (CONFIG, f"{TALKER}.codec_language_id", {"english": -1}, r"codec_language_id\['english'\] is -1"),
            (CONFIG, f"{TALKER}.spk_is_dialect", {"dylan": "klingon"}, "names 'klingon', unknown language"),
            (CONFIG, "tts_bos_token_id", 200_000, "tts_bos token id is outside text_vocab_size"),
            (CODEC, "model_type", "qwen3_tts_tokenizer_25hz", "only 'qwen3_tts_tokenizer_12hz' is supported"),
            (CODEC, "output_sample_rate", 16_000, "output_sample_rate is 16000"),
            (CODEC, f"{DECODER}.upsample_rates", [8, 5, 4, 4], "multiplied is 2560; the 12 Hz models have 1920"),
            (CODEC, f"{DECODER}.upsample_rates", [8, 5, 4, "3"], "must be a list of positive integers"),
            (CODEC, f"{DECODER}.upsampling_ratios", 4, "must be a list of positive integers"),
            (CODEC, f"{DECODER}.num_quantizers", 8, "num_quantizers is 8"),
            (CODEC, f"{DECODER}.codebook_size", 1024, "codebook_size is 1024"),
            (CODEC, f"{DECODER}.num_key_value_heads", 1, "num_key_value_heads is 1"),
        ],
    )
    def test_impossible_values(self, file, path, value, message):
        with pytest.raises(ConfigError, match=message):
            parse(changed(file, path, value))

    @pytest.mark.parametrize("value", [REMOVED, {}, {"enc_dim": 1024, "sample_rate": 24_000}])
    def test_speaker_encoder_of_base(self, value):
        """The 1.7B Base has embeddings of 2048; only Base needs the section."""
        with pytest.raises(ConfigError, match="speaker_encoder_config"):
            parse(changed(CONFIG, "speaker_encoder_config", value, variant="base"))


class TestSampling:
    @pytest.mark.parametrize("value", [REMOVED, None])
    @pytest.mark.parametrize("key", sorted(published_files()[GENERATION]))
    def test_defaults_where_a_key_is_missing(self, key, value):
        assert parse(changed(GENERATION, key, value)) == parse(published_files())

    def test_values_are_taken(self):
        files = published_files()
        files[GENERATION] |= {
            "temperature": 0.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1, "subtalker_temperature": 0.6,
            "subtalker_top_k": 0, "subtalker_top_p": 0.8, "max_new_tokens": 100,
        }  # fmt: skip
        config = parse(files)
        assert config.sampling == SamplingSpec(0.5, 20, 0.9, 1.0, 0.6, 0, 0.8)
        assert config.max_new_frames == 100

    def test_without_sampling_everything_is_greedy(self):
        sampling = parse(changed(GENERATION, "do_sample", False)).sampling
        assert sampling.greedy
        sampling = parse(changed(GENERATION, "subtalker_dosample", False)).sampling
        assert (sampling.greedy, sampling.residual_temperature) == (False, 0.0)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("temperature", "warm"),
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("top_k", -1),
            ("top_k", [50]),
            ("top_p", 0),
            ("top_p", 1.5),
            ("subtalker_top_p", 0.0),
            ("subtalker_temperature", True),
            ("subtalker_top_k", "50"),
            ("repetition_penalty", 0),
            ("max_new_tokens", 0),
            ("max_new_tokens", "8192"),
            ("do_sample", "false"),
            ("subtalker_dosample", 0),
        ],
    )
    def test_impossible_values(self, key, value):
        with pytest.raises(ConfigError, match=f"^generation_config.json: {key} "):
            parse(changed(GENERATION, key, value))


class TestFiles:
    @pytest.fixture
    def directory(self, tmp_path):
        for name, content in published_files().items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    @pytest.mark.parametrize("name", [CONFIG, CODEC])
    def test_missing(self, directory, name):
        (directory / name).unlink()
        with pytest.raises(ConfigError, match=f"{name} does not exist; a Qwen3-TTS checkpoint directory holds"):
            ModelConfig.from_directory(directory)

    @pytest.mark.parametrize("name", [CONFIG, CODEC, GENERATION])
    @pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe{}", b"\x00" * 40])
    def test_not_json(self, directory, name, content):
        (directory / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} cannot be read as JSON"):
            ModelConfig.from_directory(directory)

    @pytest.mark.parametrize(("content", "found"), [(b"[]", "list"), (b'"x"', "str"), (b"null", "NoneType")])
    def test_not_an_object(self, directory, content, found):
        (directory / CODEC).write_bytes(content)
        with pytest.raises(ConfigError, match=f"holds a JSON {found}, an object was expected"):
            ModelConfig.from_directory(directory)

    def test_a_folder_in_place_of_a_file(self, directory):
        (directory / CONFIG).unlink()
        (directory / CONFIG).mkdir()
        with pytest.raises(ConfigError, match="cannot be read"):
            ModelConfig.from_directory(directory)

    def test_errors_are_the_packages_and_values(self):
        assert issubclass(ConfigError, Qwen3TTSError)
        assert issubclass(ConfigError, ValueError)
