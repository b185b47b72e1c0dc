"""Settings: where a value may come from, who wins, and what is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from qwen3tts_hw.errors import Qwen3TTSError, SettingsError
from qwen3tts_hw.settings import Settings, listed, voices_folder
from qwen3tts_hw.vllm_plugin.choices import settings_of

NAMES = [item.name for item in dataclasses.fields(Settings)]
INTEGERS = [item.name for item in dataclasses.fields(Settings) if item.type == "int"]
MAY_BE_ZERO = ("ref_audio_trailing_silence_ms", "voices_primed")
STRINGS = [item.name for item in dataclasses.fields(Settings) if item.type == "str"]


def resolve(values=None, **environment):
    return Settings.resolve(values, environment)


class TestSources:
    def test_defaults(self):
        assert resolve() == Settings()
        assert resolve({}) == Settings()

    def test_environment(self):
        found = resolve(QWEN3TTS_GRAPHS="off", QWEN3TTS_CHUNK_FRAMES="16", QWEN3TTS_TRACE="1", PATH="/bin", GRAPHS="x")
        assert found == Settings(graphs="off", chunk_frames=16, trace=True)

    def test_the_mapping_wins_over_the_environment(self):
        found = resolve({"graphs": "on"}, QWEN3TTS_GRAPHS="off", QWEN3TTS_MAX_STREAMS="3")
        assert found == Settings(graphs="on", max_streams=3)

    def test_the_process_environment_is_read_by_default(self, monkeypatch):
        monkeypatch.setenv("QWEN3TTS_MAX_STREAMS", "7")
        assert Settings.resolve().max_streams == 7

    def test_every_setting_has_a_variable(self):
        for name in NAMES:
            value = str(getattr(Settings(), name))
            assert resolve(**{f"QWEN3TTS_{name.upper()}": value}) == Settings()

    def test_plain_values(self):
        assert resolve(Settings(max_streams=5).as_dict()) == Settings(max_streams=5)
        assert list(Settings().as_dict()) == NAMES

    def test_vllms_block(self, monkeypatch):
        for name in NAMES:
            monkeypatch.delenv(f"QWEN3TTS_{name.upper()}", raising=False)
        for config, expected in (
            (None, Settings()),
            ({}, Settings()),
            ({"other": 1}, Settings()),
            ({"qwen3tts": None}, Settings()),
            ({"qwen3tts": {"chunk_frames": 4}}, Settings(chunk_frames=4)),
        ):
            assert settings_of(SimpleNamespace(additional_config=config)) == expected


class TestRefusals:
    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(
            SettingsError, match=r"QWEN3TTS_GRAPH: unknown setting 'graph'; known: .*chunk_frames.*graphs"
        ):
            resolve(QWEN3TTS_GRAPH="off")
        with pytest.raises(SettingsError, match=r"qwen3tts\.graph: unknown setting"):
            resolve({"graph": "off"})

    @pytest.mark.parametrize("value", [[1], 5, "graphs=off", True])
    def test_a_block_that_is_no_object(self, value):
        with pytest.raises(SettingsError, match="an object of settings was expected"):
            settings_of(SimpleNamespace(additional_config={"qwen3tts": value}))

    @pytest.mark.parametrize("name", INTEGERS)
    @pytest.mark.parametrize("value", ["many", "", "1.5", 2.7, 8.0, True, None, [8]])
    def test_what_is_no_integer(self, name, value):
        with pytest.raises(SettingsError, match=f"{name} is .*; expected an integer"):
            resolve({name: value})

    @pytest.mark.parametrize("name", [name for name in INTEGERS if name not in MAY_BE_ZERO])
    @pytest.mark.parametrize("value", [0, -1, "0"])
    def test_integers_below_one(self, name, value):
        with pytest.raises(SettingsError, match=f"{name} is .*; it must be at least 1"):
            resolve({name: value})

    def test_silence_below_zero(self):
        assert resolve({"ref_audio_trailing_silence_ms": 0}).ref_audio_trailing_silence_ms == 0
        with pytest.raises(SettingsError, match="ref_audio_trailing_silence_ms is -1; it must be at least 0"):
            resolve({"ref_audio_trailing_silence_ms": -1})

    @pytest.mark.parametrize("name", STRINGS)
    @pytest.mark.parametrize("value", [1, None, True, ["x"]])
    def test_what_is_no_string(self, name, value):
        with pytest.raises(SettingsError, match=f"{name} is .*; expected a string"):
            resolve({name: value})

    @pytest.mark.parametrize("name", ["graphs", "attention_op", "codec_dtype"])
    @pytest.mark.parametrize("value", ["", "ON", "fast"])
    def test_unknown_choices_are_refused_with_the_supported_ones(self, name, value):
        with pytest.raises(SettingsError, match=f"{name} is '{value}'; supported: "):
            resolve({name: value})

    @pytest.mark.parametrize("value", ["maybe", "", 2, None])
    def test_what_is_neither_true_nor_false(self, value):
        with pytest.raises(SettingsError, match=r"trace is .*; expected true or false"):
            resolve({"trace": value})

    def test_the_variable_is_named(self):
        with pytest.raises(SettingsError, match=r"^QWEN3TTS_CHUNK_FRAMES is 'x'"):
            resolve(QWEN3TTS_CHUNK_FRAMES="x")

    def test_a_first_chunk_larger_than_the_others(self):
        with pytest.raises(SettingsError, match="first_chunk_frames 9 is larger than chunk_frames 8"):
            resolve({"first_chunk_frames": 9})
        assert resolve({"first_chunk_frames": 9, "chunk_frames": 9}).first_chunk_frames == 9

    @pytest.mark.parametrize("value", ["voices", "/srv/a,b", "/srv/../etc", "~/voices"])
    def test_folders_that_are_not_absolute(self, value):
        with pytest.raises(SettingsError, match="an absolute path is needed"):
            resolve({"ref_audio_allowed_folders": value})

    def test_errors_are_the_packages_and_values(self):
        assert issubclass(SettingsError, Qwen3TTSError)
        assert issubclass(SettingsError, ValueError)


class TestKinds:
    @pytest.mark.parametrize("value", [True, "true", "True", "1", "yes", "ON"])
    def test_true(self, value):
        assert resolve({"trace": value}).trace is True

    @pytest.mark.parametrize("value", [False, "false", "0", "no", "off"])
    def test_false(self, value):
        assert resolve({"trace": value}).trace is False

    @pytest.mark.parametrize("value", [12, "12", " 12 "])
    def test_integers(self, value):
        assert resolve({"max_streams": value}).max_streams == 12

    def test_lists(self):
        assert listed("") == ()
        assert listed(" a, b ,,c,") == ("a", "b", "c")

    def test_settings_do_not_change(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            Settings().graphs = "off"


class TestVoicesFolder:
    def test_the_setting_wins(self):
        assert voices_folder(Settings(voices_dir="/srv/voices"), {"XDG_DATA_HOME": "/data"}) == "/srv/voices"

    def test_the_users_data_folder(self):
        assert voices_folder(Settings(), {"XDG_DATA_HOME": "/data"}) == "/data/qwen3tts_hw/voices"

    @pytest.mark.parametrize("environment", [{}, {"XDG_DATA_HOME": ""}, {"XDG_DATA_HOME": "relative"}])
    def test_without_one(self, environment):
        folder = voices_folder(Settings(), environment)
        assert folder.startswith("/")
        assert folder.endswith("/.local/share/qwen3tts_hw/voices")
