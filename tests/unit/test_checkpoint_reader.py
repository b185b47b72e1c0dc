"""Damaged, incomplete and foreign checkpoint directories: each is refused with its cause; shards are read as one."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3tts_hw.checkpoint.reader import open_checkpoint, resolve_directory
from qwen3tts_hw.checkpoint.writer import make_checkpoint
from qwen3tts_hw.errors import CheckpointError, ConfigError

MAIN, CODEC, INDEX = "model.safetensors", "speech_tokenizer/model.safetensors", "model.safetensors.index.json"
NORM = "talker.model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"), variant="custom_voice", size="tiny")


@pytest.fixture
def directory(whole, tmp_path):
    yield Path(shutil.copytree(whole, tmp_path / "checkpoint"))
    shutil.rmtree(tmp_path)  # megabytes that pytest would keep for three runs


def edit_header(path, edit):
    """Rewrite a file's header through ``edit``; the tensors' data stay as they are."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def shard(directory, pieces=2):
    """Split the main weights into shards with an index."""
    weights = load_file(directory / MAIN)
    (directory / MAIN).unlink()
    names = sorted(weights)
    table = {}
    for piece in range(pieces):
        file = f"model-{piece + 1:05d}-of-{pieces:05d}.safetensors"
        part = {name: weights[name] for name in names[piece::pieces]}
        save_file(part, directory / file)
        table |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}), encoding="utf-8")
    return table


def complaint(directory):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).check()
    return str(caught.value)


class TestFiles:
    @pytest.mark.parametrize("file", [MAIN, CODEC])
    def test_missing(self, directory, file):
        (directory / file).unlink()
        message = complaint(directory)
        assert str((directory / file).parent) in message
        assert "neither model.safetensors nor" in message

    def test_pickles_are_not_read(self, directory):
        (directory / MAIN).rename(directory / "pytorch_model.bin")
        assert "never pickles" in complaint(directory)

    @pytest.mark.parametrize("file", [MAIN, CODEC])
    @pytest.mark.parametrize("lost", [1, 100_000])
    def test_cut_short(self, directory, file, lost):
        path = directory / file
        os.truncate(path, path.stat().st_size - lost)
        message = complaint(directory)
        assert str(path) in message
        assert "cut short" in message

    @pytest.mark.parametrize("size", [0, 5, 8, 500])
    def test_cut_short_within_its_header(self, directory, size):
        os.truncate(directory / MAIN, size)
        assert "cut short within its header" in complaint(directory)

    def test_too_long(self, directory):
        with (directory / MAIN).open("ab") as file:
            file.write(b"x")
        assert "too long" in complaint(directory)

    def test_large_file_pointer(self, directory):
        (directory / CODEC).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", encoding="utf-8")
        assert "git lfs pull" in complaint(directory)

    @pytest.mark.parametrize("text", [b"{broken}", b"[1, 2]  ", b"\xff\xfe\xff\xfe"])
    def test_header_that_is_no_object(self, directory, text):
        (directory / MAIN).write_bytes(len(text).to_bytes(8, "little") + text)
        assert "damaged safetensors header" in complaint(directory)

    def test_weights_of_another_kind(self, directory):
        torch.save({"a": torch.zeros(3)}, directory / MAIN)
        assert "no safetensors file" in complaint(directory)

    def test_damage_is_reported_while_reading_too(self, directory):
        os.truncate(directory / MAIN, (directory / MAIN).stat().st_size - 1)
        with pytest.raises(CheckpointError, match="cannot be read"):
            list(open_checkpoint(directory).iter_main())

    def test_missing_configuration(self, directory):
        (directory / "config.json").unlink()
        with pytest.raises(ConfigError, match=r"config\.json does not exist"):
            open_checkpoint(directory)

    def test_missing_directory(self, tmp_path):
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(tmp_path / "nowhere")


class TestTensors:
    @pytest.mark.parametrize(
        ("file", "name"),
        [(MAIN, NORM), (CODEC, "decoder.decoder.6.conv.bias"), (CODEC, "encoder.downsample.conv.weight")],
    )
    def test_missing(self, directory, file, name):
        edit_header(directory / file, lambda header: header.update(extra=header.pop(name)))
        message = complaint(directory)
        assert f"missing: {name};" in message
        assert "not part of this model: extra" in message

    def test_wrong_shape(self, directory):
        edit_header(directory / MAIN, lambda header: header[NORM].update(shape=[8, 8]))
        assert f"of another shape: {NORM} is [8, 8], expected [64]" in complaint(directory)

    def test_long_lists_are_cut(self, directory):
        def rename_all(header):
            for name in [name for name in header if name.startswith("talker.code_predictor.lm_head.")]:
                header[f"old.{name}"] = header.pop(name)

        edit_header(directory / MAIN, rename_all)
        message = complaint(directory)
        assert message.count("and 10 more") == 2
        assert len(message) < 1500

    def test_another_form(self, directory, tmp_path):
        small = make_checkpoint(tmp_path / "small", variant="custom_voice", size="tiny-0.6B")
        shutil.copy(small / MAIN, directory / MAIN)
        message = complaint(directory)
        assert "missing: talker.code_predictor.small_to_mtp_projection.weight" in message
        assert "of another shape: " in message

    def test_unsupported_type(self, directory):
        edit_header(directory / MAIN, lambda header: header[NORM].update(dtype="F64"))
        assert f"{NORM} is stored as F64; supported: F32, BF16, F16" in complaint(directory)

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": [65]},
            {"shape": [-64]},
            {"shape": "64"},
            {"shape": None},
            {"data_offsets": [0]},
            {"data_offsets": [10, 5]},
            {"data_offsets": [-256, 0]},
            {"data_offsets": ["a", "b"]},
            {"data_offsets": [0, math.inf]},
            {"data_offsets": None},
        ],
    )
    def test_damaged_entry(self, directory, change):
        edit_header(directory / MAIN, lambda header: header[NORM].update(change))
        assert NORM in complaint(directory)

    def test_entry_that_is_no_object(self, directory):
        edit_header(directory / MAIN, lambda header: header.update({NORM: 7}))
        assert f"the header entry of {NORM} is damaged" in complaint(directory)


class TestShards:
    def test_are_read_as_one(self, directory, whole):
        shard(directory, pieces=3)
        checkpoint = open_checkpoint(directory)
        checkpoint.check()
        expected = load_file(whole / MAIN)
        found = dict(checkpoint.iter_main())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_missing_shard(self, directory):
        lost = shard(directory)[NORM]
        (directory / lost).unlink()
        assert f"shards that do not exist: {lost}" in complaint(directory)

    def test_tensor_in_two_shards(self, directory):
        table = shard(directory)
        other = next(file for file in table.values() if file != table[NORM])
        part = load_file(directory / other)
        save_file({**part, NORM: torch.zeros(64)}, directory / other)
        assert f"in two shards: {NORM}" in complaint(directory)

    @pytest.mark.parametrize(
        "index", ["{", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]"]
    )
    def test_damaged_index(self, directory, index):
        shard(directory)
        (directory / INDEX).write_text(index, encoding="utf-8")
        assert INDEX in complaint(directory)

    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
    def test_index_stays_in_its_directory(self, directory, file):
        shard(directory)
        (directory / INDEX).write_text(json.dumps({"weight_map": {"a": file}}), encoding="utf-8")
        assert "outside its own directory" in complaint(directory)


class TestResolving:
    def test_local_directory(self, tmp_path):
        assert resolve_directory(tmp_path) == tmp_path
        assert resolve_directory(str(tmp_path)) == tmp_path

    def test_file(self, tmp_path):
        (tmp_path / "x").touch()
        with pytest.raises(CheckpointError, match="is a file"):
            resolve_directory(tmp_path / "x")

    @pytest.mark.parametrize("name", ["/no/such/place", "nothing", "a/b/c", "owner/na me"])
    def test_neither_directory_nor_hub_id(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match="does not look like a hub id"):
            resolve_directory(name)

    def test_empty_name_is_not_the_current_directory(self):
        with pytest.raises(CheckpointError, match="name is empty"):
            resolve_directory("")

    def test_hub_id_is_downloaded(self, tmp_path, monkeypatch):
        calls = []

        def download(repo, *, revision, allow_patterns):
            calls.append((repo, revision))
            assert "*.safetensors" in allow_patterns
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert resolve_directory("Qwen/Some-Model", revision="abc") == tmp_path
        assert calls == [("Qwen/Some-Model", "abc")]

    @pytest.mark.parametrize("error", [OSError("no route"), ValueError("no route")])
    def test_failed_download(self, monkeypatch, error):
        def download(*_args, **_kwargs):
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(CheckpointError, match="downloading it from the hub failed: no route"):
            resolve_directory("Qwen/Some-Model")
