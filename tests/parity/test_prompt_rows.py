"""The prompt layout, filled with raw weights by NumPy alone, gives the prompt rows of the official package."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.prompt.layout import build_layout
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from tests.parity.golden import cases

TOLERANCE = 1e-6


class RawEmbeddings:
    """The two embedding paths of the talker, computed from the weight file."""

    def __init__(self, directory):
        self.stored = safe_open(str(directory / "model.safetensors"), "np")

    def weight(self, name):
        return self.stored.get_tensor(f"talker.{name}").astype(np.float64)

    def linear(self, name, rows):
        return rows @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def text(self, ids):
        """Return one row per text id, zeros where the id is -1."""
        known = np.asarray(ids, dtype=np.int64)
        rows = self.weight("model.text_embedding.weight")[np.maximum(known, 0)]
        inner = self.linear("text_projection.linear_fc1", rows)
        outer = self.linear("text_projection.linear_fc2", inner / (1.0 + np.exp(-inner)))  # SiLU between
        return outer * (known >= 0)[:, None]

    def codec(self, ids):
        """Return one row per codec id, zeros where the id is -1."""
        known = np.asarray(ids, dtype=np.int64)
        return self.weight("model.codec_embedding.weight")[np.maximum(known, 0)] * (known >= 0)[:, None]


def layout_of(case, directory):
    config = ModelConfig.from_directory(directory)
    return build_layout(config, TextTokenizer.from_directory(directory), case.request(config))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
class TestPromptRows:
    def test_prompt_rows_agree(self, case, golden_checkpoint):
        directory = golden_checkpoint(case)
        layout, embeddings = layout_of(case, directory), RawEmbeddings(directory)
        expected = case.arrays["prompt_rows"]
        assert layout.length == len(layout.text_ids) == len(layout.codec_ids) == len(expected)
        rows = embeddings.text(layout.text_ids) + embeddings.codec(layout.codec_ids)
        worst = np.abs(rows - expected).max(axis=1)
        row = int(worst.argmax())
        assert worst[row] <= TOLERANCE, (
            f"row {row} (text id {layout.text_ids[row]}, codec id {layout.codec_ids[row]}) differs by {worst[row]:.2e}"
        )

    def test_trailing_rows_agree(self, case, golden_checkpoint):
        directory = golden_checkpoint(case)
        layout, embeddings = layout_of(case, directory), RawEmbeddings(directory)
        # After the trailing ids every frame takes the pad row; the official list names the pad row where it is empty.
        steps = max(len(case.arrays["trailing_rows"]), len(layout.trailing_text_ids)) + 1
        ids = [*layout.trailing_text_ids, *[layout.pad_text_id] * (steps - len(layout.trailing_text_ids))]
        missing = steps - len(case.arrays["trailing_rows"])
        expected = np.concatenate([case.arrays["trailing_rows"], *[case.arrays["pad_row"]] * missing])
        assert np.abs(embeddings.text(ids) - expected).max() <= TOLERANCE

    def test_template_ids_agree(self, case, golden_checkpoint):
        tokenizer = TextTokenizer.from_directory(golden_checkpoint(case))
        assert tuple(tokenizer.encode(case.text)) == tuple(case.arrays["template_ids"][3:-5])
        assert tuple(tokenizer.encode(case.instruct or "")) == tuple(case.arrays["instruct_ids"][3:-2])
