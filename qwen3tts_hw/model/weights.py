"""From checkpoint names to parameters: the only place that knows both spellings.

A target is a view into a parameter; loading copies one tensor into one view. Whatever is missing, left over or of
another shape is an error that names it: a model that starts has every weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from qwen3tts_hw.errors import CheckpointError
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.layers import DecoderLayer, Linear, RMSNorm
from qwen3tts_hw.types import NUM_CODEBOOKS

TALKER_LAYERS = "talker.model.layers."
TALKER_NORM = "talker.model.norm.weight"
TALKER_HEAD = "talker.codec_head.weight"
IGNORED_PREFIXES = ("speaker_encoder.",)  # read by the voice-clone front end, not by the talker
_PREDICTOR = "talker.code_predictor."
_NAMED_AT_MOST = 5

Targets = dict[str, Tensor]


def stack_targets(prefix: str, layers: Iterable[nn.Module]) -> Targets:
    """Targets of a decoder stack whose checkpoint names start with ``prefix`` + layer number."""
    targets: Targets = {}
    for index, layer in enumerate(layers):
        assert isinstance(layer, DecoderLayer)
        query, kv = layer.query_size, layer.kv_size
        inner = layer.config.intermediate_size
        attention, mlp = f"{prefix}{index}.self_attn.", f"{prefix}{index}.mlp."
        targets[f"{prefix}{index}.input_layernorm.weight"] = layer.input_norm.weight
        targets[f"{prefix}{index}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
        targets[attention + "q_proj.weight"] = layer.qkv.weight[:query]
        targets[attention + "k_proj.weight"] = layer.qkv.weight[query : query + kv]
        targets[attention + "v_proj.weight"] = layer.qkv.weight[query + kv :]
        targets[attention + "o_proj.weight"] = layer.out.weight
        targets[attention + "q_norm.weight"] = layer.query_norm.weight
        targets[attention + "k_norm.weight"] = layer.key_norm.weight
        targets[mlp + "gate_proj.weight"] = layer.gate_up.weight[:inner]
        targets[mlp + "up_proj.weight"] = layer.gate_up.weight[inner:]
        targets[mlp + "down_proj.weight"] = layer.down.weight
    return targets


def embedding_targets(text: TextEmbedder, codes: CodeEmbedder) -> Targets:
    """Targets of the text path and of all 16 codec tables."""
    targets: Targets = {"talker.model.text_embedding.weight": text.table}
    for name, linear in (("linear_fc1", text.fc1), ("linear_fc2", text.fc2)):
        targets.update(_linear(f"talker.text_projection.{name}.", linear))
    targets["talker.model.codec_embedding.weight"] = codes.codebook(0)
    for group in range(1, NUM_CODEBOOKS):
        targets[f"{_PREDICTOR}model.codec_embedding.{group - 1}.weight"] = codes.codebook(group)
    return targets


def predictor_targets(predictor: CodePredictor) -> Targets:
    """Targets of the code predictor, its projection and heads included."""
    targets = stack_targets(f"{_PREDICTOR}model.layers.", predictor.layers)
    targets[f"{_PREDICTOR}model.norm.weight"] = predictor.norm.weight
    if predictor.projection is not None:
        targets.update(_linear(f"{_PREDICTOR}small_to_mtp_projection.", predictor.projection))
    for group in range(1, NUM_CODEBOOKS):
        targets.update(_linear(f"{_PREDICTOR}lm_head.{group - 1}.", cast(Linear, predictor.heads[group - 1])))
    return targets


def talker_targets(layers: Iterable[nn.Module], norm: RMSNorm, head: Linear) -> Targets:
    """Targets of the plain-torch talker stack and its head."""
    return {**stack_targets(TALKER_LAYERS, layers), TALKER_NORM: norm.weight, TALKER_HEAD: head.weight}


def is_talker_stack(name: str) -> bool:
    """Whether a checkpoint name belongs to the talker's own stack or head, which an engine may load by itself."""
    return name.startswith(TALKER_LAYERS) or name in (TALKER_NORM, TALKER_HEAD)


@torch.no_grad()
def load(weights: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]) -> None:
    """Copy every weight into its target; raise CheckpointError naming what is missing, left over or misshapen."""
    waiting = dict(targets)
    left_over: list[str] = []
    for name, tensor in _relevant(weights):
        target = waiting.pop(name, None)
        if target is None:
            left_over.append(name)
            continue
        if target.shape != tensor.shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}; config.json calls for {list(target.shape)}")
        target.copy_(tensor)
    if left_over:
        raise CheckpointError(f"the checkpoint holds tensors this model has no place for: {_listing(left_over)}")
    if waiting:
        raise CheckpointError(f"the checkpoint lacks tensors: {_listing(waiting)}")


def _relevant(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in weights if not name.startswith(IGNORED_PREFIXES))


def _linear(prefix: str, linear: Linear) -> Targets:
    targets: Targets = {prefix + "weight": linear.weight}
    if linear.bias is not None:
        targets[prefix + "bias"] = linear.bias
    return targets


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED_AT_MOST
    return ", ".join(ordered[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
