"""Measure loading and saving a local safetensors folder of 1.5 GB: resident memory, time, and bit-exactness.

python benchmarks/load_model.py [--model gpt-0.7b] [--directory .]

The folder contains random bf16 weights in the shape of a preset. Each row is a separate process; its resident memory is
the peak minus the usage after the imports. Limit: chunks, the largest tensor and 300 MB. A row with transformers' own
`from_pretrained` followed by `patrickstar.initialize` shows the savings of reading directly into chunks. The saved
folder must contain the same bytes as the original.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import publish
from transformers import AutoModelForCausalLM

import patrickstar as ps
from patrickstar._checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from patrickstar._layout.byte_size import format_size
from patrickstar._models.presets import PRESETS
from patrickstar.integrations.transformers import from_pretrained
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta
from patrickstar.integrations.transformers._model_folder import tensors_of

SLACK_BYTES = 300 * 1000**2
OPTIMIZERS = {"SGD": ps.SGD(lr=1e-3), "AdamW": ps.AdamW()}
METHODS = [("transformers, then initialize", "SGD"), ("direct to chunks", "SGD"), ("direct to chunks", "AdamW")]


def resident_bytes(field: str) -> int:
    """Return resident memory: VmRSS is the current usage, VmHWM the peak since `reset_peak` or the process start."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def write_folder(folder: Path, preset: str) -> None:
    """Write a model with random weights without ever holding it in memory."""
    folder.mkdir()
    config = PRESETS[preset].config()
    with parameters_on_meta():
        model = build_model(config, AutoModelForCausalLM)
    entries = [TensorEntry(name, torch.bfloat16, tuple(param.shape)) for name, param in model.named_parameters()]
    file = SafetensorsFile(folder / "model.safetensors", entries, {"format": "pt"})
    for entry in entries:
        for rows in torch.empty(entry.shape, device="meta").split(4096):
            file.write(torch.randn(rows.shape).mul_(0.02).to(torch.bfloat16))
    file.close()
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.to_json_file(folder / "config.json")


def same_bytes(source: Path, target: Path) -> bool:
    expected, actual = tensors_of(source), tensors_of(target)
    if {key: (entry.dtype, entry.shape) for key, entry in expected.items()} != {
        key: (entry.dtype, entry.shape) for key, entry in actual.items()
    }:
        return False
    for key, entry in expected.items():
        values = torch.empty(2, entry.numel, dtype=torch.bfloat16)
        entry.read_into(values[0], 0)
        actual[key].read_into(values[1], 0)
        if not torch.equal(*values.view(torch.int16)):
            return False
    return True


def run(options: argparse.Namespace) -> dict[str, object]:
    """Load, save and compare in this process."""
    source, target = Path(options.run), Path(options.run).with_name("out")
    config = ps.Config(device="cpu", optimizer=OPTIMIZERS[options.optimizer])
    libraries = resident_bytes("VmRSS")
    reset_peak()
    start = time.perf_counter()
    if options.method == "transformers, then initialize":
        engine, _ = ps.initialize(AutoModelForCausalLM.from_pretrained(source), config)
    else:
        engine, _ = from_pretrained(source, config)
    load_s, load_peak = time.perf_counter() - start, resident_bytes("VmHWM")
    before = resident_bytes("VmRSS")
    reset_peak()
    start = time.perf_counter()
    engine.save_pretrained(target, dtype="bf16")
    save_s = time.perf_counter() - start
    return {
        "libraries": libraries,
        "peak": load_peak - libraries,
        "chunks": engine.layout.model_data_bytes,
        "load_s": load_s,
        "save_s": save_s,
        "save_peak": resident_bytes("VmHWM") - before,
        "same": same_bytes(source, target),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-0.7b")
    parser.add_argument("--directory", type=Path, default=Path("."))
    for name in ("run", "method", "optimizer"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options)))
        return
    rows = []
    for method, optimizer in METHODS:
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            folder = Path(scratch) / "in"
            write_folder(folder, options.model)
            stored = tensors_of(folder).values()
            largest = max(2 * entry.numel for entry in stored)
            nbytes = sum(2 * entry.numel for entry in stored)
            command = [sys.executable, __file__, "--run", str(folder), "--method", method, "--optimizer", optimizer]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        limit = result["chunks"] + largest + SLACK_BYTES
        rows.append(
            [
                f"{method}, {optimizer}",
                format_size(result["chunks"]),
                f"{format_size(result['peak'])} of {format_size(limit)}",
                format_size(result["libraries"]),
                f"{result['load_s']:.1f} s",
                f"{result['save_s']:.1f} s",
                format_size(result["save_peak"]),
                "yes" if result["same"] else "no",
            ]
        )
    publish(
        "load_model",
        "cpu",
        f"{options.model} in bf16, a safetensors folder of {format_size(nbytes)} with a largest tensor of "
        f"{format_size(largest)}, loaded into chunks in RAM and saved in bf16. Peak RSS excludes the usage of the "
        f"libraries; its limit is chunks + the largest tensor + 300 MB. The folder may be in the page cache.",
        [
            "method, optimizer",
            "chunks",
            "peak RSS of limit",
            "libraries",
            "load",
            "save",
            "extra RSS in save",
            "bit-identical after save",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
