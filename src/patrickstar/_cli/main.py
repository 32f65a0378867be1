"""Commands and options of the command line, and error reporting."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import patrickstar
from patrickstar._cli.option_words import in_options
from patrickstar.errors import PatrickStarError

_USAGE_ERROR = 2
_INTERRUPTED = 130  # the exit code that shells use for a command ended by Ctrl-C

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"patrickstar {patrickstar.__version__}")
        raise typer.Exit


@app.callback()
def patrickstar_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models that are larger than the memory available to them."""


@app.command()
def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file, or folder with text files; may be repeated. "
            "Default: the sources of this Python's standard library."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Preset such as gpt-40m or t5-60m, open model such as llama-3.2-1b, .json file, or folder."),
    ] = "gpt-10m",
    vocab_size: Annotated[
        int | None, typer.Option(min=257, help="Vocabulary size in tokens. Default: that of the model.")
    ] = None,
    sequence: Annotated[int, typer.Option(min=2, help="Sequence length in tokens.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch and process.")] = 4,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches per optimizer step (gradient accumulation).")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 100,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop at the end of a step, before this many minutes have passed; --resume continues the run. The "
            "learning rate follows --steps. Default: no limit."
        ),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 3e-4,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps of linear learning rate warm-up; a cosine decay follows.")
    ] = 10,
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay of AdamW.")] = 0.01,
    max_norm: Annotated[
        float, typer.Option(min=0, help="Clip gradients to this global norm; 0 disables clipping.")
    ] = 1.0,
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option(help="Compute precision. auto: what is fast on the device, or that of --resume's checkpoint."),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Compute device.")] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory budget on the compute device, such as 2GiB. Default: the free memory."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory budget on the host (RAM). Default: the free memory.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="Directory on a local disk, for model data that exceeds memory. Default: none.")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option(help="Largest size of the swap file, such as 200GiB. Default: the free space.")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Store states on disk in 7/8 of their bytes.")] = False,
    durable: Annotated[bool, typer.Option("--durable", help="Save each step, in what --disk stores anyway.")] = False,
    chunk_size: Annotated[
        str, typer.Option(help="Size of a parameter chunk in bytes or such as 64MiB, or auto.")
    ] = "auto",
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Recompute activations in backward instead of keeping them.",
        ),
    ] = False,
    checkpointing_share: Annotated[
        str | None,
        typer.Option(help="Share of the layers to recompute; 'products' stores results of products; 'auto' chooses."),
    ] = None,
    activation_offload: Annotated[
        bool, typer.Option("--activation-offload", help="Move activations to the host between forward and backward.")
    ] = False,
    tiled_loss: Annotated[
        bool, typer.Option("--tiled-loss", help="Compute the loss by tiles of tokens, without storing logits.")
    ] = False,
    tiled_mlp: Annotated[bool, typer.Option("--tiled-mlp", help="Compute MLPs and norms by tiles of tokens.")] = False,
    in_backward: Annotated[
        bool, typer.Option("--in-backward", help="Update in backward: 12 bytes per parameter. Needs --max-norm 0.")
    ] = False,
    delay_from: Annotated[
        int | None,
        typer.Option(min=0, help="Delay updates by one step from this step on. Not exact: see docs/staleness.md."),
    ] = None,
    lock_free_from: Annotated[
        int | None,
        typer.Option(min=0, help="From this step on update states on disk once they are read. Not exact, as above."),
    ] = None,
    max_staleness: Annotated[
        int, typer.Option(min=1, help="With --lock-free-from: steps that the parameters may be behind, at most.")
    ] = 4,
    update_log: Annotated[
        Path | None, typer.Option(help="With --lock-free-from: file for the order of updates, to be replayed.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Repeat the lock-free updates of a run from its --update-log, bit by bit.")
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="With torchrun: processes that share a batch, each with a part of every layer (tensor parallelism).",
        ),
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            help="With torchrun: processes that together hold all experts (expert parallelism); a multiple of --tp.",
        ),
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            help="With torchrun: replicas, such as nodes, that exchange only gradients and new parameters.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial values and the order of batches.")] = 0,
    log: Annotated[
        Path | None,
        typer.Option("--log", "--log-file", help="Write a JSON line per step, and a summary line, to this file."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write scalars of each step to this directory, for TensorBoard. Default: none.")
    ] = None,
    save_every: Annotated[
        int,
        typer.Option(min=0, help="Write a checkpoint every N steps and after the last one; 0 disables checkpoints."),
    ] = 0,
    save_to: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints; by default --resume's, runs/checkpoints or DISK/steps.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Checkpoints to keep; by default 3, durable 1.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume from a checkpoint, or from the newest one in a folder.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the summary.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Do not train; simulate a step and report whether it fits, its time and its memory."
        ),
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="With --dry-run: machine to simulate instead of this one; see `patrickstar plan --machine`."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="With --dry-run: number of processes to simulate; one per GPU. Default: 1."),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
) -> None:
    """Train a language model on text within memory budgets; one with an encoder learns to write removed spans."""
    arguments = locals()
    with _reported_errors(traceback):
        from patrickstar._cli.early_checks import refuse_early, refuse_too_large
        from patrickstar._cli.train_options import TrainOptions
        from patrickstar.errors import ConfigError

        options = TrainOptions(**_fields(TrainOptions, arguments | {"data": tuple(data or ())}))
        refuse_early(options)
        if machine is None and resume is None:
            refuse_too_large(options)
        # Imported here because its libraries take seconds to load, and --help should not.
        from patrickstar._cli.dry_run import dry_run_training
        from patrickstar._cli.train import train as run

        if dry_run:
            dry_run_training(options, Console(), machine, processes or 1)
            return
        if machine is not None:
            raise ConfigError(f"--machine {machine} requires --dry-run: training runs on this machine")
        if processes is not None:
            raise ConfigError(
                f"--processes {processes} requires --dry-run: several processes are started by torchrun, as in "
                f"`torchrun --nproc-per-node {processes} -m patrickstar train`"
            )
        summary = run(options, Console())
    if summary is not None and summary.interrupted:
        raise typer.Exit(_INTERRUPTED)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="Preset such as gpt-12b, open model such as llama-3-8b, config.json, or folder. Default: a table of "
            "the open models that fit."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Built-in machine such as RTX4090-desktop, TOML file, or 'here' to measure this one. "
            "Default: 8xV100-32GB."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="In place of --machine: a GPU such as rtx4090, h100 or mi300x, in a usual computer."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of such machines, connected by their network.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs of a machine to use. Default: all; with --gpu 1.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism: GPUs that divide the matrices of a layer.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism: GPUs that divide the experts of a layer.")] = 1,
    capacity_factor: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Buffer of each expert, relative to the mean number of tokens: the rest is padded or dropped. "
            "Default: no buffers; the busiest process is estimated.",
        ),
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory budget of each GPU. Default: its memory.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory that each host has. Default: its own.")] = None,
    host_bandwidth: Annotated[
        str | None,
        typer.Option(help="Rate of each host's memory, reads plus writes, such as 170GB/s. Default: its own."),
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores of each host for training. Default: all.")] = None,
    disk: Annotated[
        str | None, typer.Option(help="Drive of each host: capacity, and rates if known, such as 1TB:7GB/s.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per GPU, or per tensor-parallel group. Default: whichever is fastest."),
    ] = None,
    sequence: Annotated[int, typer.Option(min=2, help="Sequence length in tokens.")] = 1024,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Recompute activations in backward instead of keeping them. Default: whichever is faster.",
        ),
    ] = None,
    tiled_loss: Annotated[
        bool, typer.Option("--tiled-loss", help="Compute the loss by tiles of tokens, without storing logits.")
    ] = False,
    tiled_mlp: Annotated[bool, typer.Option("--tiled-mlp", help="Compute MLPs and norms by tiles of tokens.")] = False,
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option(help="Compute precision. auto: the 16-bit one of the device; on this CPU what is faster."),
    ] = "auto",
    lora: Annotated[
        int | None,
        typer.Option(help="Train LoRA adapters of this rank beside a frozen base. Default: train the whole model."),
    ] = None,
    qlora: Annotated[
        int | None, typer.Option(help="Train LoRA adapters of this rank beside a frozen base of 4 bits.")
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest dense GPT, of GPT-2's architecture, that fits.")
    ] = False,
    least_tflops: Annotated[float, typer.Option(min=0, help="With --largest: minimum speed per GPU.")] = 0.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run/--no-dry-run",
            help="Let the engine run a step on the simulated machine, which takes seconds, beside the estimate.",
        ),
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Also write the plan as a page for a browser to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
) -> None:
    """Predict whether a model fits a machine or a cluster, how fast it trains, what limits it. Nothing is trained."""
    arguments = locals()
    with _reported_errors(traceback):
        from patrickstar._cli.early_checks import refuse_unwritable
        from patrickstar._cli.plan import PlanOptions
        from patrickstar._cli.plan import plan as run

        if html is not None:
            refuse_unwritable(html.parent, "--html")
        run(PlanOptions(**_fields(PlanOptions, arguments)), Console())


@app.command()
def report(
    log: Annotated[Path, typer.Argument(help="Log of a run, from `train --log` or `engine.record(FILE)`.")],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: beside the log, with the same name.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Log of another run, to be shown on the same page.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
) -> None:
    """Write a page that shows what a run did: memory, channels, waits, and what would make it faster."""
    with _reported_errors(traceback):
        from patrickstar._cli.report import report as run

        run(log, output, compare, Console())


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of patrickstar train, or folder of checkpoints.")],
    folder: Annotated[Path, typer.Argument(help="Model folder to write: new or empty.")],
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="Precision of the exported parameters.")
    ] = "fp32",
    max_shard: Annotated[str, typer.Option(help="Largest size of a file, such as 5GB.")] = "5GB",
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
) -> None:
    """Convert a checkpoint to a model folder for other programs: safetensors, config.json and tokenizer."""
    with _reported_errors(traceback):
        from patrickstar._cli.early_checks import refuse_missing_checkpoint

        refuse_missing_checkpoint(checkpoint)
        from patrickstar._cli.export import export as run

        run(checkpoint, folder, dtype, max_shard, Console())


@app.command()
def doctor(
    disk: Annotated[
        Path | None, typer.Option(help="Directory for the disk tier; its read and write speed is measured.")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="Also write sizes and rates to this file, for `plan --machine` on any computer.")
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
) -> None:
    """Report what this machine and this installation support, with advice on what is missing."""
    with _reported_errors(traceback):
        from patrickstar._cli.early_checks import refuse_unwritable

        if machine is not None:
            refuse_unwritable(machine.parent, "--machine")
        from patrickstar._cli.doctor import examine, print_findings

        print_findings(Console(), examine(disk=disk, machine=machine))


def _fields(options: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments of a command that are fields of its options."""
    return {field.name: arguments[field.name] for field in fields(options)}


@contextmanager
def _reported_errors(show_traceback: bool) -> Iterator[None]:
    """Report an error in one line and exit: with code 2 if the user can fix it, 1 for a bug, 130 for Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted before the first step was done", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        user_error = isinstance(error, PatrickStarError)
        if user_error:
            message = f"error: {in_options(str(error))}"
        else:
            message = f"internal error: {type(error).__name__}: {error}; this is a bug, --traceback shows where"
        typer.echo(message, err=True)
        raise typer.Exit(_USAGE_ERROR if user_error else 1) from None
