"""Damaged, forged and mismatched checkpoints are rejected without side effects."""

import json
import os
import pickle
import random
import shutil

import pytest
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint.atomic_dir import list_checkpoints
from patrickstar._checkpoint.manifest import NAME

from .checkpoint_cases import assert_refused, engine_of


@pytest.fixture(scope="module")
def engine():
    """An engine that every refused checkpoint leaves as it is."""
    engine = engine_of()
    yield engine
    engine.close()


def test_flipped_bits_are_detected(engine, saved_checkpoint, tmp_path):
    path, _ = saved_checkpoint
    draw = random.Random(5)
    for number in range(12):
        damaged = shutil.copytree(path, tmp_path / str(number))
        file = draw.choice(sorted(damaged.iterdir()))
        content = bytearray(file.read_bytes())
        offset = draw.randrange(len(content))
        # A flip in the header may have an error message of its own, so the message is not compared.
        content[offset] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        print(f"seed 5: byte {offset} of {file.name}")
        assert_refused(engine, damaged)


@pytest.mark.parametrize("name", [NAME, "rank-00000.safetensors"])
def test_truncated_and_missing_files(engine, checkpoint_copy, name):
    file = checkpoint_copy / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert_refused(engine, checkpoint_copy, "bytes")
    file.write_bytes(content[: len(content) // 2])
    assert_refused(engine, checkpoint_copy)
    file.write_bytes(b"")
    assert_refused(engine, checkpoint_copy)
    file.unlink()
    assert_refused(engine, checkpoint_copy)


def test_folders_that_are_not_checkpoints(engine, tmp_path):
    assert_refused(engine, tmp_path / "nothing", "no such folder")
    (tmp_path / "empty").mkdir()
    assert_refused(engine, tmp_path / "empty", "checkpoint.jsonl")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(MaliciousPickle(tmp_path / "ran")))
    assert_refused(engine, tmp_path / "dcp", "pickle")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert_refused(engine, tmp_path / "model", "model folder")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / NAME).write_bytes(pickle.dumps(MaliciousPickle(tmp_path / "ran")))
    assert_refused(engine, tmp_path / "pickled")
    assert not (tmp_path / "ran").exists(), "code was run"


class MaliciousPickle:
    """Object whose pickle runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forge(path, change=lambda manifest: None, **header):
    """Change the manifest and fields of the header, and update the checksum."""
    first, manifest = ((json.loads(text)) for text in (path / NAME).read_bytes().split(b"\n", 1))
    change(manifest)
    text = json.dumps(manifest).encode()
    first |= {"nbytes": len(text), "xxh3": xxh3_64_hexdigest(text)} | header
    (path / NAME).write_bytes(json.dumps(first).encode() + b"\n" + text)


def test_newer_versions(engine, checkpoint_copy):
    forge(checkpoint_copy, version=3)
    assert_refused(engine, checkpoint_copy, "version 3", "newer")
    assert list_checkpoints(checkpoint_copy.parent) == []
    forge(checkpoint_copy, version=1, format=["patrickstar checkpoint"])  # a list in place of a string
    assert_refused(engine, checkpoint_copy)


def words(manifest):
    return manifest["tensors"]["model.words.weight"]


def part(manifest):
    return words(manifest)["parts"][0]


def overlap(manifest):
    first = part(manifest)
    words(manifest)["parts"] = [first | {"sizes": [8, 24]}, first | {"sizes": [5, 24], "at": first["at"] + 8 * 96}]


FORGERIES = {
    "relative path outside": lambda manifest: manifest["files"][0].update(name="../../etc/passwd"),
    "absolute path": lambda manifest: manifest["files"][0].update(name="/etc/passwd"),
    "huge file": lambda manifest: manifest["files"][0].update(nbytes=2**62),
    "huge pages": lambda manifest: manifest.update(page_bytes=2**40),
    "page size zero": lambda manifest: manifest.update(page_bytes=0),
    "huge shape": lambda manifest: words(manifest).update(shape=[2**40, 2**40]),
    "negative shape": lambda manifest: words(manifest).update(shape=[-13, -24]),
    "huge part": lambda manifest: part(manifest).update(sizes=[2**40, 24]),
    "part outside the file": lambda manifest: part(manifest).update(at=2**40),
    "negative offset": lambda manifest: part(manifest).update(at=-4096),
    "unknown file": lambda manifest: part(manifest).update(file=7),
    "unknown dtype": lambda manifest: words(manifest).update(dtype="object"),
    "duplicate parts": lambda manifest: words(manifest).update(parts=words(manifest)["parts"] * 2),
    "no parts": lambda manifest: words(manifest).update(parts=[]),
    "tensor marked as plain data": lambda manifest: words(manifest).update(plain=True),
    "unknown field": lambda manifest: manifest.update(code="import os"),
    "no plain data": lambda manifest: manifest["tensors"].pop("patrickstar"),
    "plain data at another offset": lambda manifest: manifest["tensors"]["patrickstar"]["parts"][0].update(at=4096),
    "deep nesting": lambda manifest: manifest.update(files=json.loads("[" * 900 + "]" * 900)),
    "overlapping parts": overlap,
}


@pytest.mark.parametrize("case", FORGERIES)
def test_forged_manifests_are_rejected_without_large_allocations(engine, checkpoint_copy, case):
    forge(checkpoint_copy, FORGERIES[case])
    assert assert_refused(engine, checkpoint_copy) < 32 * 1024**2


def test_missing_boxes_are_reported(engine, checkpoint_copy):
    forge(checkpoint_copy, lambda manifest: part(manifest).update(sizes=[9, 24]))
    assert_refused(engine, checkpoint_copy, "model.words.weight", "do not cover [9:13, 0:24] of a tensor [13, 24]")


def test_symlink_in_place_of_a_file_is_rejected(engine, checkpoint_copy, tmp_path):
    file = checkpoint_copy / "rank-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert_refused(engine, checkpoint_copy)


def test_mismatched_models_are_reported_by_name(engine, checkpoint_copy):
    def rename(manifest):
        tensors = manifest["tensors"]
        tensors["model.strange"] = tensors.pop("model.conv.bias")
        tensors["model.head.bias"]["shape"] = tensors["model.head.bias"]["parts"][0]["sizes"] = [12]

    forge(checkpoint_copy, rename)
    assert_refused(
        engine, checkpoint_copy, "it lacks conv.bias", "the model lacks strange", "of another shape are head.bias"
    )


def forge_plain_data(path, change):
    """Replace the plain data and update all checksums."""
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())

    def replace(manifest):
        for name in ("patrickstar", "patrickstar.rank-00000"):
            part = manifest["tensors"][name]["parts"][0]
            begin, length = part["at"], part["sizes"][0]
            fields = json.loads(content[begin : begin + length])
            if "buffers" in fields:
                fields["buffers"] = []  # makes the text shorter, since its length is fixed
            change(fields)
            text = json.dumps(fields, separators=(",", ":")).encode()
            assert len(text) <= length, "the new text is too long"
            content[begin : begin + length] = text.ljust(length)
        page = manifest["page_bytes"]
        manifest["files"][0]["sums"] = [
            xxh3_64_hexdigest(bytes(content[begin : begin + page])) for begin in range(0, len(content), page)
        ]

    forge(path, replace)
    file.write_bytes(content)


INVALID_PLAIN_DATA = {
    "no random states": lambda fields: fields.pop("random", None),
    "missing random state": lambda fields: fields.get("random", {}).pop("python", None),
    "random state of another type": lambda fields: "random" in fields and fields["random"].update(torch=5),
    "negative step count": lambda fields: "steps" in fields and fields["steps"].update({"words.weight": -7}),
    "learning rate of another type": lambda fields: [group.update(lr="x") for group in fields.get("groups", ())],
    "no betas": lambda fields: [group.update(betas=None) for group in fields.get("groups", ())],
    "extra state of an unknown module": lambda fields: (
        "extra" in fields and fields["extra"].update({"no.such.module._extra_state": 1})
    ),
    "invalid array": lambda fields: "random" in fields and fields.update(user={"a": {"$array": [",", [0], ""]}}),
    "invalid tensor": lambda fields: "random" in fields and fields.update(user={"a": {"$tensor": []}}),
    "batches with a gap": lambda fields: "batch_of" in fields and fields.update(batch_of=[1]),
    "batches of other processes": lambda fields: "batch_of" in fields and fields.update(batch_of=[0, 0]),
    "zero loss scale": lambda fields: "loss_scale" in fields and fields.update(loss_scale={"scale": 0.0}),
}


@pytest.mark.parametrize("case", INVALID_PLAIN_DATA)
def test_invalid_plain_data_changes_nothing(engine, checkpoint_copy, case):
    forge_plain_data(checkpoint_copy, INVALID_PLAIN_DATA[case])
    random.seed(4)
    before = random.getstate()
    assert_refused(engine, checkpoint_copy)
    assert random.getstate() == before


def test_checkpoints_without_batches_are_of_distinct_ones(checkpoint_copy):
    forge_plain_data(checkpoint_copy, lambda fields: fields.pop("batch_of", None))
    assert engine_of().load(checkpoint_copy)["note"] == [1, 2]
