"""Validation of requests: what passes unchanged, what is normalised, what is refused and how it is explained."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_hw.errors import RequestError, UnknownVoiceError
from qwen3tts_hw.prompt.request import build_request, check_reference_text
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import ClonedVoice, SamplingSpec
from tests.unit.published_configs import published_config

CUSTOM, DESIGN, BASE = (published_config(variant) for variant in ("custom_voice", "voice_design", "base"))
SMALL = published_config("custom_voice", "0.6B")
SETTINGS = Settings(max_text_chars=50)


def build(config=CUSTOM, **given_fields):
    fields = {"text": "Hello world.", **({"voice": "ryan"} if config.variant == "custom_voice" else {}), **given_fields}
    return build_request(config, SETTINGS, **fields)


def refusal(config=CUSTOM, **given_fields):
    with pytest.raises(RequestError) as caught:
        build(config, **given_fields)
    return caught.value


def test_defaults_are_the_checkpoints():
    request = build(seed=7)
    assert request.sampling == replace(CUSTOM.sampling, seed=7)
    assert request.sampling == SamplingSpec(seed=7)
    assert (request.text, request.voice, request.language) == ("Hello world.", "ryan", "auto")
    assert (request.instruct, request.text_mode, request.max_frames) == (None, "whole", 8192)


def test_values_given_are_kept():
    request = build(
        language="english",
        instruct="Very happy.",
        text_mode="streaming",
        temperature=0.5,
        top_k=20,
        top_p=0.75,
        repetition_penalty=1.25,
        seed=2**63 - 1,
        max_new_tokens=12,
    )
    assert request.sampling == SamplingSpec(0.5, 20, 0.75, 1.25, seed=2**63 - 1)
    assert (request.language, request.instruct, request.text_mode) == ("english", "Very happy.", "streaming")
    assert request.max_frames == 12


def test_temperature_zero_is_greedy_for_all_codebooks():
    sampling = build(temperature=0).sampling
    assert sampling.greedy
    assert sampling.residual_temperature == 0.0
    assert build(temperature=0.5).sampling.residual_temperature == CUSTOM.sampling.residual_temperature


def test_missing_seeds_differ_and_are_in_range():
    seeds = {build().sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


class TestText:
    @pytest.mark.parametrize("text", ["", " ", "\n\t ", "\N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}"])
    def test_nothing_to_speak(self, text):
        assert refusal(text=text).field == "input"

    def test_longest_text(self):
        assert build(text="a" * 50).text == "a" * 50
        error = refusal(text="a" * 51)
        assert error.field == "input"
        assert "51 characters; at most 50" in error.message

    def test_unpaired_surrogate(self):
        error = refusal(text="ab\ud800c")
        assert error.field == "input"
        assert "U+D800 at character 2" in error.message

    @pytest.mark.parametrize("text", [None, 5, b"abc", ["abc"], True])
    def test_other_types(self, text):
        error = refusal(text=text)
        assert error.field == "input"
        assert "must be a string" in error.message


class TestVoice:
    @pytest.mark.parametrize("voice", ["uncle_fu", "Uncle_Fu", "UNCLE FU", " uncle-fu ", "Uncle  Fu"])
    def test_spellings(self, voice):
        assert build(voice=voice).voice == "uncle_fu"

    @pytest.mark.parametrize("voice", ["my-voice", "My_Voice", "my voice"])
    def test_names_of_the_checkpoint_may_have_hyphens(self, voice):
        tuned = replace(CUSTOM, speaker_ids={"my-voice": 3000}, speaker_dialects={})
        assert build(tuned, voice=voice).voice == "my-voice"

    @pytest.mark.parametrize("voice", ["alloy", "", "ryan2", "unclefu"])
    def test_unknown(self, voice):
        error = refusal(voice=voice)
        assert isinstance(error, UnknownVoiceError)
        assert error.field == "voice"
        assert repr(voice) in error.message
        assert "aiden, dylan, eric, ono_anna, ryan, serena, sohee, uncle_fu, vivian" in error.message

    def test_long_name_is_cut_in_the_message(self):
        assert len(refusal(voice="x" * 10_000).message) < 300

    def test_missing(self):
        error = refusal(voice=None)
        assert (error.field, type(error)) == ("voice", RequestError)
        assert "supported: aiden" in error.message

    @pytest.mark.parametrize("voice", [3, ["ryan"], False])
    def test_other_types(self, voice):
        assert refusal(voice=voice).field == "voice"

    def test_voice_design_has_none(self):
        error = refusal(DESIGN, voice="ryan", instruct="Very happy.")
        assert error.field == "voice"
        assert "custom_voice" in error.message
        assert build(DESIGN, instruct="Very happy.").voice is None

    @pytest.mark.parametrize("voice", [None, "ryan"])
    def test_base_has_no_presets(self, voice):
        error = refusal(BASE, voice=voice)
        assert error.field == "voice"
        assert "reference audio" in error.message
        assert "ref_audio" in error.message


class TestLanguage:
    @pytest.mark.parametrize("language", ["english", "English", " ENGLISH "])
    def test_case_does_not_matter(self, language):
        assert build(language=language).language == "english"

    @pytest.mark.parametrize("language", ["klingon", "", "en"])
    def test_unknown(self, language):
        error = refusal(language=language)
        assert error.field == "language"
        assert "supported: auto, chinese, english" in error.message
        assert "beijing" not in error.message

    def test_dialects_are_chosen_through_the_voice(self):
        error = refusal(language="Beijing_Dialect")
        assert error.field == "language"
        assert "voice (dylan)" in error.message

    def test_other_types(self):
        assert refusal(language=2050).field == "language"


class TestInstructions:
    @pytest.mark.parametrize("instruct", [None, "", "  \n"])
    def test_none_given(self, instruct):
        assert build(instruct=instruct).instruct is None
        assert build(SMALL, instruct=instruct).instruct is None

    def test_small_model_refuses(self):
        error = refusal(SMALL, instruct="Very happy.")
        assert error.field == "instructions"
        assert "1.7B-CustomVoice" in error.message

    @pytest.mark.parametrize("instruct", [None, "", " "])
    def test_voice_design_needs_them(self, instruct):
        assert refusal(DESIGN, instruct=instruct).field == "instructions"

    @pytest.mark.parametrize("instruct", [7, "a" * 51, "\udfff!"])
    def test_unusable(self, instruct):
        assert refusal(instruct=instruct).field == "instructions"


@pytest.mark.parametrize("mode", ["", "Whole", "non_streaming", 1, True])
def test_unknown_text_mode(mode):
    assert refusal(text_mode=mode).field == "text_mode"


class TestNumbers:
    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("temperature", [0, 0.0, 0.01, 1, 10, Fraction(1, 2), np.float32(0.5)]),
            ("top_p", [1, 1.0, 0.001]),
            ("repetition_penalty", [1, 10, 0.5]),
            ("top_k", [0, 1, 2048, np.int64(5)]),
            ("seed", [0, 2**63 - 1]),
        ],
    )
    def test_accepted(self, field, values):
        for value in values:
            found = getattr(build(**{field: value}).sampling, field)
            assert found == value
            assert type(found) in (int, float)

    @pytest.mark.parametrize("value", [1, 8192])
    def test_frame_limits(self, value):
        assert build(max_new_tokens=value).max_frames == value

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("temperature", [-0.1, 0.001, 10.5]),
            ("top_p", [0, -1, 1.01, 1e-9]),
            ("repetition_penalty", [0, -1.05, 11, 1e-9]),
            ("top_k", [-1, 2049, 1.0, 50.5]),
            ("seed", [-1, 2**63, 1.0]),
            ("max_new_tokens", [0, -5, 8193, 10.0]),
        ],
    )
    def test_out_of_range(self, field, values):
        for value in values:
            error = refusal(**{field: value})
            assert error.field == field
            assert field in error.message

    @pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "top_k", "seed", "max_new_tokens"])
    @pytest.mark.parametrize(
        "value",
        [
            True,
            False,
            "1",
            "",
            [1],
            {},
            1j,
            b"1",
            math.nan,
            math.inf,
            -math.inf,
            10**400,
            -(10**5000),
            sys.float_info.max,
        ],
        ids=lambda value: str(type(value).__name__),
    )
    def test_no_usable_number(self, field, value):
        error = refusal(**{field: value})
        assert error.field == field
        assert len(error.message) < 200

    @given(
        field=st.sampled_from(["temperature", "top_p", "repetition_penalty", "top_k", "seed", "max_new_tokens"]),
        value=st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.lists(st.integers()),
    )
    def test_anything_is_accepted_or_refused_by_name(self, field, value):
        try:
            request = build(**{field: value})
        except RequestError as error:
            assert error.field == field
        else:
            sampling = request.sampling
            assert sampling.greedy or 0.01 <= sampling.temperature <= 10
            assert 0 < sampling.top_p <= 1
            assert 0 < sampling.repetition_penalty <= 10
            assert 1 <= request.max_frames <= 8192


class TestClonedVoice:
    EMBEDDING = bytes(4 * BASE.talker.hidden_size)

    def test_it_is_kept_and_text_streams_by_default(self):
        voice = ClonedVoice(self.EMBEDDING, "Good morning.", bytes(32))
        request = build(BASE, voice=voice)
        assert (request.voice, request.text_mode) == (voice, "streaming")
        assert build(BASE, voice=voice, text_mode="whole").text_mode == "whole"

    @pytest.mark.parametrize("size", [0, 4, BASE.talker.hidden_size * 4 + 1, 4 * 1_024])
    def test_another_width(self, size):
        error = refusal(BASE, voice=ClonedVoice(bytes(size)))
        assert error.field == "speaker_embedding"
        assert str(BASE.talker.hidden_size) in error.message

    @pytest.mark.parametrize(("text", "codes"), [("Good morning.", b""), ("", bytes(32)), (" ", bytes(32))])
    def test_text_and_codes_belong_together(self, text, codes):
        assert refusal(BASE, voice=ClonedVoice(self.EMBEDDING, text, codes)).field == "ref_text"

    @pytest.mark.parametrize("config", [CUSTOM, DESIGN])
    def test_other_checkpoints_name_the_right_one(self, config):
        error = refusal(config, voice=ClonedVoice(self.EMBEDDING))
        assert error.field == "voice"
        assert "1.7B-Base" in error.message

    def test_instructions(self):
        error = refusal(BASE, voice=ClonedVoice(self.EMBEDDING), instruct="Whisper.")
        assert error.field == "instructions"
        assert "(base)" in error.message

    @pytest.mark.parametrize("text", [None, "", " \n", 3, "a" * 20_001])
    def test_reference_text(self, text):
        with pytest.raises(RequestError) as caught:
            check_reference_text(text, Settings())
        assert caught.value.field == "ref_text"
