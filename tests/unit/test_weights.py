"""Loading: every tensor of a checkpoint has exactly one place, and every place gets exactly one tensor."""

from __future__ import annotations

import pytest
import torch

from qwen3tts_hw.checkpoint.inventory import main_tensors
from qwen3tts_hw.errors import CheckpointError
from qwen3tts_hw.model.weights import IGNORED_PREFIXES, is_talker_stack, load
from tests.unit.published_configs import published_config
from tests.unit.tiny_model import build_model, load_model, targets_of

FORMS = [("custom_voice", "tiny"), ("custom_voice", "tiny-0.6B"), ("voice_design", "tiny"), ("base", "tiny")]


@pytest.fixture(params=FORMS, ids="-".join)
def config(request):
    return published_config(*request.param)


@pytest.fixture
def small():
    """Two targets and the weights for them."""
    targets = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    return targets, {"a": torch.ones(2, 3), "b": torch.full((4,), 2.0)}


def test_targets_are_the_inventory(config):
    expected = {name: shape for name, shape in main_tensors(config).items() if not name.startswith(IGNORED_PREFIXES)}
    assert {name: tuple(target.shape) for name, target in targets_of(build_model(config)).items()} == expected


def test_targets_fill_every_parameter_without_overlap(config):
    model = build_model(config)
    parameters = [
        parameter
        for module in (model.text, model.codes, model.talker, model.predictor)
        for parameter in module.parameters()
    ]
    for parameter in parameters:
        parameter.fill_(-1)
    targets = targets_of(model)
    for number, target in enumerate(targets.values()):
        target.fill_(number)
    assert all((target == number).all() for number, target in enumerate(targets.values()))
    assert (model.codes.table[model.codes.zero_row] == -1).all()  # the row of zeros is nobody's
    unfilled = sum(int((parameter == -1).sum()) for parameter in parameters)
    assert unfilled == model.codes.table.shape[1]


def test_loaded_values_are_the_checkpoints(tiny_checkpoint):
    model = load_model(tiny_checkpoint())
    for name, target in targets_of(model).items():
        assert torch.equal(target, model.weights[name]), name
    assert not model.codes.table[model.codes.zero_row].any()
    packed = model.talker.layers[1].qkv.weight
    parts = [model.weights[f"talker.model.layers.1.self_attn.{part}_proj.weight"] for part in ("q", "k", "v")]
    assert torch.equal(packed, torch.cat(parts))


def test_speaker_encoder_tensors_are_passed_over(tiny_checkpoint):
    model = load_model(tiny_checkpoint(variant="base"))
    assert any(name.startswith("speaker_encoder.") for name in model.weights)


def test_the_talkers_own_stack_is_told_apart(config):
    own = {name for name in main_tensors(config) if is_talker_stack(name)}
    model = build_model(config)
    stack = {*targets_of(model)} - {
        name for name in targets_of(model) if "code_predictor" in name or "text_" in name or "codec_embedding" in name
    }
    assert own == stack


class TestLoad:
    def test_order_does_not_matter(self, small):
        targets, weights = small
        load(reversed(weights.items()), targets)
        assert all(torch.equal(targets[name], weights[name]) for name in weights)

    def test_values_are_cast(self, small):
        targets, weights = small
        load(((name, value.to(torch.bfloat16)) for name, value in weights.items()), targets)
        assert targets["b"].tolist() == [2.0] * 4

    def test_missing(self, small):
        targets, weights = small
        del weights["b"]
        with pytest.raises(CheckpointError, match=r"lacks tensors: b$"):
            load(weights.items(), targets)

    def test_left_over(self, small):
        targets, weights = small
        with pytest.raises(CheckpointError, match=r"no place for: c$"):
            load({**weights, "c": torch.ones(1)}.items(), targets)

    def test_given_twice(self, small):
        targets, weights = small
        with pytest.raises(CheckpointError, match=r"no place for: a$"):
            load([*weights.items(), ("a", weights["a"])], targets)

    @pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (2, 3, 1), (1, 3)])
    def test_another_shape(self, small, shape):
        targets, weights = small
        with pytest.raises(CheckpointError, match=r"a has shape \[.*\]; config.json calls for \[2, 3\]"):
            load({**weights, "a": torch.ones(shape)}.items(), targets)

    def test_long_lists_are_cut(self):
        targets = {f"tensor.{index}": torch.zeros(1) for index in range(9)}
        with pytest.raises(CheckpointError, match=r"tensor.0, .*tensor.4 and 4 more$"):
            load([], targets)
