"""The three calls of `benchmarks/gpu.py`: their programs, in turns, the most valuable ones first."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_stages.turns import Program, Turn

GIB = 1 << 30
TEST_FILES = Path(__file__).parents[2] / "tests" / "cuda"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
COMPUTE_SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"


class Call(NamedTuple):
    """Programs that one command runs, its time limit, and what results they have."""

    name: str
    minutes: float
    description: str


CALLS = {
    call.name: call
    for call in (
        Call("tests", 5, "tests/cuda in a process per file, sanitizers, bits"),
        Call("steps", 6, "whole steps: 1, 3 and 8 billion parameters, against plain PyTorch, FSDP2 and DeepSpeed"),
        Call("micro", 2, "kernel rates, copies, page-locking, the disk"),
    )
}


def turns_of(call: Call, device: str, output: Path) -> list[Turn]:
    """Return the turns of a call; on a CPU small ones, as a trial. Results of programs go to `output`."""
    if call.name == "tests":
        return _tests(device)
    return _steps(device, output) if call.name == "steps" else _micro(device, output)


def _tests(device: str) -> list[Turn]:
    small = device == "cpu"
    # All files run at once: fewer threads each. No bit depends on their number.
    settings = DETERMINISTIC | {"OMP_NUM_THREADS": "4"} | ({"PATRICKSTAR_TEST_DEVICE": "cpu"} if small else {})
    names = sorted(path.name for path in TEST_FILES.glob("test_*.py"))

    def of_files(name: str, files: Sequence[str], *arguments: str) -> Program:
        options = {"files": files, "arguments": arguments}
        return Program(name, "gpu_stages.tests:run", 150, options, settings=settings)

    if small:
        files = [of_files("collected", names, "--collect-only"), of_files("collectives", ["test_collectives_cuda.py"])]
    else:
        files = [of_files(name.removeprefix("test_").removesuffix(".py"), [name]) for name in names]
    options = {"device": device, "small": small}
    # It compares addresses of whole tensors; it would miss the second parameter of a chunk. The tiny model has one.
    sanitized = [("races between streams", {} if small else {"TORCH_CUDA_SANITIZER": "1"}, ())]
    # `cudaErrorNotReady` of an event query is no error.
    tool = shutil.which("compute-sanitizer") or COMPUTE_SANITIZER
    memcheck = (tool, "--report-api-errors", "no", "--target-processes", "all")
    if Path(memcheck[0]).exists() and not small:
        unpooled = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        sanitized.append(("accesses out of bounds", unpooled, (*memcheck, "--error-exitcode", "9")))
    checks = [
        Program(name, "gpu_stages.tests:train_tiny", 90, options, settings=DETERMINISTIC | more, wrapper=wrapper)
        for name, more, wrapper in sanitized
    ]
    return [files, [*checks, Program("bits", "gpu_stages.bits:run", 90, options, settings=DETERMINISTIC)]]


def _steps(device: str, output: Path) -> list[Turn]:
    """Return the runs. Steps of 32,768 tokens are four backwards: the logits of one would exceed 24 GiB."""
    small = device == "cpu"

    def run(
        trainer: str,
        model: str,
        batch: int,
        host_gib: int = 0,
        *,
        sequence: int = 2048,
        limit_s: float = 60,
        **more: Any,
    ) -> Turn:
        shape = f"{model}-{batch}x{sequence}{'-disk' if 'disk' in more else ''}"
        options = {"trainer": trainer, "model": model, "device": device, "batch": batch, "sequence": sequence} | more
        if small:
            options |= {"model": "tiny", "sequence": 16, "steps": 1}
        if trainer == "engine":
            budgets = {"host_memory": GIB, "device_memory": GIB // 16} if small else {"host_memory": host_gib * GIB}
            options |= budgets | {"log": str(output / f"gpu-steps-{shape}.jsonl")}
        imports = ("deepspeed", "gpu_stages.deepspeed_kernel") if trainer == "deepspeed" else ()
        return [Program(f"{shape}, {trainer}", "gpu_stages.trainer:train", limit_s, options, imports, settings)]

    # DeepSpeed asks who its process is; without these it would ask MPI.
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    settings |= {"OMP_NUM_THREADS": "1"} if small else {}
    capped = {"device_memory": 24 * GIB}
    whole = {"sequence": 1024, "checkpointing": False}
    if small:
        return [run("engine", "3b", 16, parts=4, variants=True), run("fsdp2", "3b", 4), run("deepspeed", "3b", 4)]
    return [
        run("engine", "3b", 4, 64, limit_s=110, variants=True, **capped),
        run("fsdp2", "3b", 4),
        run("plain", "3b", 4),
        run("engine", "gpt-1b", 4, 16, **whole),
        run("plain", "gpt-1b", 4, **whole),
        run("engine", "3b", 16, 64, parts=4, **capped),
        run("engine", "8b", 4, 107, limit_s=110, **capped),
        run("engine", "8b", 16, 107, limit_s=130, parts=4, steps=2, **capped),
        run("fsdp2", "3b", 16, parts=4),
        run("deepspeed", "3b", 4),
        run("deepspeed", "3b", 16, parts=4),
        run("engine", "gpt-1b", 4, 4, sequence=1024, device_memory=8 * GIB, disk=str(output), steps=2, limit_s=120),
    ]


def _micro(device: str, output: Path) -> list[Turn]:
    options = {"device": device, "small": device == "cpu", "directory": str(output)}
    limits_s = {"updates": 30, "copies": 30, "page_locking": 30, "disk": 60}
    programs = [Program(name, f"gpu_stages.micro:{name}", limit_s, options) for name, limit_s in limits_s.items()]
    return [[program] for program in (Program("versions", "gpu_stages.versions:run", 30, options), *programs)]
