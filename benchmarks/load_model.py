"""Loading a local safetensors folder of 1.5 GB and writing it again: resident memory, seconds, and the bits.

python benchmarks/load_model.py [--model gpt-0.7b] [--directory .]

The folder holds random bf16 weights in a preset's shape. Each row is a process of its own, so that its resident memory
is its own: the most that it had in physical memory, less what it had once the libraries were there. Limit: chunks, the
largest tensor and 300 MB. A row for transformers' own `from_pretrained`, whose model is then given to
`patrickstar.initialize`, shows what reading straight into chunks saves. The folder that is written has to hold the very
bytes that were read.
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
from patrickstar._cli.presets import PRESETS
from patrickstar._layout.byte_size import format_size
from patrickstar.integrations.transformers import from_pretrained
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta
from patrickstar.integrations.transformers._model_folder import tensors_of

SLACK_BYTES = 300 * 1000**2
OPTIMIZERS = {"SGD": ps.SGD(lr=1e-3), "AdamW": ps.AdamW()}
WAYS = [("transformers, then initialize", "SGD"), ("straight into chunks", "SGD"), ("straight into chunks", "AdamW")]


def resident_bytes(field: str) -> int:
    """VmRSS: now. VmHWM: the most since `forget_peak`, or since the process began."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def write_folder(folder: Path, preset: str) -> None:
    """A model of random weights, which is never in memory."""
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


def same_bytes(one: Path, other: Path) -> bool:
    ours, theirs = tensors_of(one), tensors_of(other)
    if {key: (found.dtype, found.shape) for key, found in ours.items()} != {
        key: (found.dtype, found.shape) for key, found in theirs.items()
    }:
        return False
    for key, found in ours.items():
        values = torch.empty(2, found.numel, dtype=torch.bfloat16)
        found.read_into(values[0], 0)
        theirs[key].read_into(values[1], 0)
        if not torch.equal(*values.view(torch.int16)):
            return False
    return True


def run(options: argparse.Namespace) -> dict[str, object]:
    """One process: load, save, compare."""
    source, target = Path(options.run), Path(options.run).with_name("out")
    config = ps.Config(device="cpu", optimizer=OPTIMIZERS[options.optimizer])
    libraries = resident_bytes("VmRSS")
    forget_peak()
    start = time.perf_counter()
    if options.way == "transformers, then initialize":
        engine, _ = ps.initialize(AutoModelForCausalLM.from_pretrained(source), config)
    else:
        engine, _ = from_pretrained(source, config)
    load_s, load_peak = time.perf_counter() - start, resident_bytes("VmHWM")
    before = resident_bytes("VmRSS")
    forget_peak()
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
    for name in ("run", "way", "optimizer"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options)))
        return
    rows = []
    for way, optimizer in WAYS:
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            folder = Path(scratch) / "in"
            write_folder(folder, options.model)
            stored = tensors_of(folder).values()
            largest = max(2 * one.numel for one in stored)
            nbytes = sum(2 * one.numel for one in stored)
            command = [sys.executable, __file__, "--run", str(folder), "--way", way, "--optimizer", optimizer]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        limit = found["chunks"] + largest + SLACK_BYTES
        rows.append(
            [
                f"{way}, {optimizer}",
                format_size(found["chunks"]),
                f"{format_size(found['peak'])} of {format_size(limit)}",
                format_size(found["libraries"]),
                f"{found['load_s']:.1f} s",
                f"{found['save_s']:.1f} s",
                format_size(found["save_peak"]),
                "yes" if found["same"] else "no",
            ]
        )
    publish(
        "load_model",
        "cpu",
        f"{options.model} in bf16, a safetensors folder of {format_size(nbytes)} whose largest tensor has "
        f"{format_size(largest)}, loaded into chunks in RAM and written again in bf16. Peak RSS is above what the "
        f"libraries take; its limit is chunks + the largest tensor + 300 MB. The folder may be in the page cache.",
        [
            "how, optimizer",
            "chunks",
            "peak RSS of limit",
            "libraries",
            "load",
            "save",
            "more RSS in save",
            "the same bytes again",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
