"""Model folders: files of a size, which the safetensors library reads."""

import json

import pytest
import torch
from safetensors.torch import load_file

from patrickstar._checkpoint.hf_export import common_dtype, shards_of, write_model_folder
from patrickstar._checkpoint.safetensors_file import TensorEntry

DTYPES = [torch.bfloat16, torch.float32] * 3
TENSORS = {f"{number}": torch.randn(number, 3).to(dtype) for number, dtype in enumerate(DTYPES)}


@pytest.mark.parametrize(("max_bytes", "files"), [(1 << 20, 1), (40, 4), (1, 6)])
def test_a_folder_holds_all_tensors_in_files_of_the_size(tmp_path, max_bytes, files):
    entries = [TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]
    shards = shards_of(entries, max_bytes)
    ordered = [TENSORS[entry.name] for shard in shards.values() for entry in shard]
    write_model_folder(tmp_path, shards, iter(ordered), {"config.json": "{}"})
    found = {path.name: load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))}
    assert len(found) == files
    assert all(len(file) == 1 or sum(value.nbytes for value in file.values()) <= max_bytes for file in found.values())
    whole = {name: value for file in found.values() for name, value in file.items()}
    assert whole.keys() == TENSORS.keys() and all(torch.equal(whole[name], value) for name, value in TENSORS.items())
    assert (tmp_path / "config.json").read_text() == "{}"
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(value.nbytes for value in TENSORS.values())}
        assert all(name in found[file] for name, file in index["weight_map"].items())


def test_the_dtype_of_a_folder_represents_those_of_its_tensors():
    assert common_dtype([torch.bfloat16, torch.bfloat16]) == "bfloat16"
    assert common_dtype([torch.bfloat16, torch.float16]) == "float32"
