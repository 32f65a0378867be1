"""Measure loading and saving a local safetensors folder of 1.5 GB: resident memory, time, and bit-exactness.

python benchmarks/load_model.py [--model gpt-0.7b] [--directory .]

The folder contains random bf16 weights in the shape of a preset. Each row is a separate process; its resident memory is
the peak minus the usage after the imports. Limit: chunks, the largest tensor and 300 MB. A row with transformers' own
`from_pretrained` followed by `patrickstar.initialize` shows the savings of reading directly into chunks. The saved
folder must contain the same bytes as the original.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from fresh_processes import apart, growth, resident_bytes
from report import options, publish
from transformers import AutoModelForCausalLM

import patrickstar as ps
from patrickstar._layout.byte_size import format_size
from patrickstar._models.model_source import find_model
from patrickstar.integrations.transformers import from_pretrained
from patrickstar.integrations.transformers._model_folder import TensorInFile, tensors_of

SLACK_BYTES = 300 * 1000**2
OPTIMIZERS = {"SGD": ps.SGD(lr=1e-3), "AdamW": ps.AdamW()}
METHODS = [("transformers, then initialize", "SGD"), ("direct to chunks", "SGD"), ("direct to chunks", "AdamW")]


def write_folder(folder: Path, preset: str) -> None:
    """Write a model with random weights."""
    model = AutoModelForCausalLM.from_config(find_model(preset).config, dtype=torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    model.save_pretrained(folder)


def same_bytes(source: Path, target: Path) -> bool:
    def bits(entry: TensorInFile) -> torch.Tensor:
        values = torch.empty(entry.numel, dtype=torch.bfloat16)
        entry.read_into(values, 0)
        return values.view(torch.int16)

    expected, actual = tensors_of(source), tensors_of(target)
    shapes = [{key: (entry.dtype, entry.shape) for key, entry in each.items()} for each in (expected, actual)]
    return shapes[0] == shapes[1] and all(torch.equal(bits(expected[key]), bits(actual[key])) for key in expected)


def run(source: Path, method: str, optimizer: str) -> dict[str, str]:
    """Load, save and compare in this process; return a row."""
    target, config = source.with_name("out"), ps.Config(device="cpu", optimizer=OPTIMIZERS[optimizer])
    libraries, made = resident_bytes("VmRSS"), []

    def load() -> None:
        if method == "direct to chunks":
            made.append(from_pretrained(source, config)[0])
        else:
            made.append(ps.initialize(AutoModelForCausalLM.from_pretrained(source), config)[0])

    load_s, peak = growth(load)
    save_s, save_peak = growth(partial(made[0].save_pretrained, target, dtype="bf16"))
    chunks = made[0].layout.model_data_bytes
    return {
        "method, optimizer": f"{method}, {optimizer}",
        "chunks": format_size(chunks),
        "peak RSS of limit": f"{format_size(peak)} of {format_size(chunks + max(sizes_of(source)) + SLACK_BYTES)}",
        "libraries": format_size(libraries),
        "load": f"{load_s:.1f} s",
        "save": f"{save_s:.1f} s",
        "extra RSS in save": format_size(save_peak),
        "bit-identical after save": "yes" if same_bytes(source, target) else "no",
    }


def sizes_of(folder: Path) -> list[int]:
    """Return the bytes of the tensors of a folder in bf16."""
    return [2 * entry.numel for entry in tensors_of(folder).values()]


def main() -> None:
    given = options(__doc__, model="gpt-0.7b", directory=Path("."))
    rows = []
    for method, optimizer in METHODS:
        with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
            folder = Path(scratch) / "in"
            write_folder(folder, given.model)
            sizes = sizes_of(folder)
            rows.append(apart(run, folder, method, optimizer))
    publish(
        "load_model",
        f"{given.model} in bf16, a safetensors folder of {format_size(sum(sizes))} with a largest tensor of "
        f"{format_size(max(sizes))}, loaded into chunks in RAM and saved in bf16. Peak RSS excludes the usage of the "
        f"libraries; its limit is chunks + the largest tensor + 300 MB. The folder may be in the page cache.",
        rows,
    )


if __name__ == "__main__":
    main()
