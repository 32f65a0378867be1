"""Damaged, malicious or mismatched folders are rejected by name; failed saves leave no files."""

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from laws.tiers import files_no_larger_than
from safetensors.torch import load_file, save_file

import patrickstar as ps
from patrickstar.errors import CheckpointError, ModelError
from patrickstar.integrations.transformers import _from_pretrained as load_room
from patrickstar.integrations.transformers import from_pretrained

from . import tiny
from .tiny import small_chunks, step

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny.llama().save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        from_pretrained(folder, small_chunks(), **options)
    assert str(folder) in str(caught.value)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    rest = {name: value for name, value in tensors.items() if value is not None}
    save_file(rest, folder / "model.safetensors", {"format": "pt"})


def edit_header(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("length", [0, 5, 8, 100, -1])
def test_truncated_file(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    refused(folder, "truncated")


@pytest.mark.parametrize("header_bytes", [2**63, 2**40, 10**8 + 1, 99_000_000])
def test_huge_header_size_allocates_no_memory(folder, header_bytes):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(header_bytes.to_bytes(8, "little") + data[8:])
    tracemalloc.start()
    refused(folder, f"declares a header of {header_bytes} bytes")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_offsets": [0, 2**60]}, "ends at byte"),
        ({"data_offsets": [-8, 8]}, "begins at byte -8"),
        ({"data_offsets": [8, 0]}, "begins at byte 8 and ends at 0"),
        ({"data_offsets": [0]}, "is not valid"),
        ({"shape": [2**40, 2**40]}, r"bytes, which does not match F32 of shape \[1099511627776, 1099511627776\]"),
        ({"shape": [-1]}, "is not valid"),
        ({"shape": "48"}, "is not valid"),
        ({"dtype": "F8_E4M3"}, rf"mismatched: {WEIGHT} \(F8_E4M3, .* for {WEIGHT} \(float32"),
        ({"dtype": "I32"}, r"mismatched: .*\(I32"),
        ({"dtype": "object"}, r"mismatched: .*\(object"),
    ],
)
def test_header_with_wrong_entries(folder, fields, message):
    edit_header(folder, lambda header: header[WEIGHT].update(fields))
    refused(folder, message)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff\xff", b"[" * 100_000, b'{"a": 1}'])
def test_invalid_header(folder, text):
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refused(folder, "can't be read as safetensors")


def test_file_that_is_truncated_while_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    refused(folder, "ends at byte .* within model")


@pytest.mark.parametrize(
    "shard", ["../stolen.safetensors", "{}/stolen.safetensors", "sub/../../stolen.safetensors", "a\0b"]
)
def test_index_with_paths_outside_of_the_folder(folder, shard):
    shard = shard.format(folder.parent)
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder.parent / "stolen.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {WEIGHT: shard}}))
    refused(folder, "outside of its folder")


def test_symlinks_are_followed(folder):
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    from_pretrained(folder, small_chunks())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "model.safetensors"}}', "don't hold: a$"),
        ('{"weight_map": {"a": 5}}', "can't be read"),
        ('{"weight_map": {"a": {}}}', "can't be read"),
        ('{"weight_map": 5}', "can't be read"),
        ("[]", "can't be read"),
        ('{"weight_map": {"a": "other.safetensors"}}', "'other.safetensors', which does not exist"),
    ],
)
def test_mismatched_index(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, message)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_never_opened(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, rf"as pickles \({name}\), which can run code")
    (folder / name).unlink()
    refused(folder, "has neither model.safetensors nor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {WEIGHT: None, "model.norm.weight": None, "extra.weight": torch.ones(2)},
            rf"missing: {WEIGHT}, model.norm.weight; unexpected: extra.weight$",
        ),
        (
            {f"extra.{number:02d}": torch.ones(2) for number in range(25)},
            r"unexpected: extra.00, .*, extra.09 and 15 more$",
        ),
        (
            {WEIGHT: torch.zeros(48, 33)},
            rf"mismatched: {WEIGHT} \(F32, \[48, 33\]\) for {WEIGHT} \(float32, \[48, 32\]\)$",
        ),
    ],
    ids=["missing and unexpected", "many", "of another shape"],
)
def test_tensors_that_do_not_match_are_listed(folder, changes, message):
    rewrite(folder, **changes)
    refused(folder, message)


def test_tensors_that_the_model_class_ignores_are_accepted(folder, monkeypatch):
    computed = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    rewrite(folder, **{name: torch.ones(2) for name in ("extra.weight", *computed)})
    build = load_room.build_model

    def declaring(*args: Any) -> Any:
        model = build(*args)
        model._keys_to_ignore_on_load_unexpected = {r"^extra\."}
        return model

    monkeypatch.setattr(load_room, "build_model", declaring)
    engine, _ = from_pretrained(folder, small_chunks())
    assert "extra.weight" not in engine.state_dict()


def test_missing_expert(tmp_path):
    tiny.mixtral().save_pretrained(tmp_path / "in")
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    rewrite(tmp_path / "in", **{name.format(10, "w2"): None})
    refused(tmp_path / "in", r"experts.0.w2.weight and 9 more \(F32, \[10, 32, 48\]\) for .*down_proj .*\[11, 32, 48\]")
    tiny.mixtral().save_pretrained(tmp_path / "in")
    rewrite(tmp_path / "in", **{name.format(10, "w1"): None})
    refused(tmp_path / "in", r"gate_up_proj' is stored in .* and 19 more, which do not match each other")


def test_mismatched_model_class(folder, tmp_path):
    for model_class in (tiny.MASKED, transformers.GPT2LMHeadModel):
        with pytest.raises(ModelError, match=rf"^{model_class.__name__} can't build a llama: .*LlamaConfig"):
            from_pretrained(folder, small_chunks(), model_class=model_class)
    refused(tmp_path / "nowhere", "is not a folder; pass a local one")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused(folder, "quantized")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "none"}))
    refused(folder, "'none', which is unknown")


# Saving


def test_full_disk_leaves_no_files(tmp_path):
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(tiny.llama(), small_chunks())
    # Shards before the failing one are smaller than the limit.
    with files_no_larger_than(16_000), pytest.raises(CheckpointError, match=r"can't write .* bytes \(.*File too large"):
        engine.save_pretrained(tmp_path / "out", max_shard_bytes=8_000)
    assert list(tmp_path.iterdir()) == []
    step(engine, optimizer)
    engine.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == engine.state_dict().keys()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((call, OSError(errno.ENOSPC, "No space left")) for call in ("fsync", "rename", "posix_fallocate", "pwritev")),
        ("posix_fallocate", KeyboardInterrupt()),
    ],
)
def test_failure_of_any_call_leaves_no_files(call, error, tmp_path, monkeypatch):
    engine, optimizer = ps.initialize(tiny.llama(), small_chunks())
    real = getattr(os, call)
    for number in range(1, 30):
        calls = []

        def failing(*args: Any, calls: list[Any] = calls, number: int = number, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == number:
                raise error
            return real(*args, **options)

        monkeypatch.setattr(os, call, failing)
        if call == "rename":
            monkeypatch.setattr(Path, "rename", lambda self, target, rename=failing: rename(self, target))
        try:
            engine.save_pretrained(tmp_path / "out", max_shard_bytes=30_000)
            break
        except KeyboardInterrupt as caught:
            assert caught is error
        except CheckpointError as caught:
            assert "bytes" in str(caught) and "free" in str(caught)
        finally:
            monkeypatch.undo()
        if (tmp_path / "out").exists():
            # The folder is complete; only its name may not be synced to disk.
            assert call == "fsync" and (tmp_path / "out/config.json").exists()
            break
        assert list(tmp_path.iterdir()) == []
    assert number > 1
    step(engine, optimizer)
