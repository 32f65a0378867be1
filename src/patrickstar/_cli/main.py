"""The command line's commands and their options, and how errors are told."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import patrickstar
from patrickstar.errors import PatrickStarError

_USAGE_ERROR = 2
_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patrickstar {patrickstar.__version__}")
        raise typer.Exit


@app.callback()
def patrickstar_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models that are larger than the memory they are given."""


@app.command()
def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file, or a folder with text files; may be given again. "
            "Default: the sources of this Python's standard library."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A preset such as gpt-40m, a config .json file, or a local model folder.")
    ] = "gpt-10m",
    vocab_size: Annotated[
        int | None, typer.Option(min=257, help="Tokens of the vocabulary. Default: the model's.")
    ] = None,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens in a sample.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 4,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches in a step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 3e-4,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps in which the learning rate rises; then it falls along a cosine.")
    ] = 10,
    weight_decay: Annotated[float, typer.Option(min=0, help="AdamW's weight decay.")] = 0.01,
    max_norm: Annotated[float, typer.Option(min=0, help="Clip gradients to this global norm; 0 for never.")] = 1.0,
    precision: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="What operators compute in.")] = "bf16",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="The compute device.")] = "auto",
    device_memory: Annotated[
        str | None, typer.Option(help="Budget on the compute device, such as 2GiB. Default: what the machine has.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Budget in the host's RAM. Default: what the machine has.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="A directory on a local disk, for what memory can't hold. Default: none.")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option(help="The most that may lie there, such as 200GiB. Default: what is free.")
    ] = None,
    chunk_size: Annotated[str, typer.Option(help="Size of a chunk of parameters, or auto.")] = "auto",
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Compute activations again in backward instead of keeping them.",
        ),
    ] = False,
    activation_offload: Annotated[
        bool,
        typer.Option("--activation-offload", help="Keep activations on the host between forward and backward."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Fixes the initial values and the order of the batches.")] = 0,
    log: Annotated[
        Path | None,
        typer.Option("--log", "--log-file", help="Write one JSON line for each step, and one at the end."),
    ] = None,
    save_every: Annotated[
        int, typer.Option(min=0, help="Write a checkpoint after every so many steps and after the last; 0 for never.")
    ] = 0,
    save_to: Annotated[
        Path | None, typer.Option(help="The folder for checkpoints. Default: that of --resume, or runs/checkpoints.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many checkpoints stay there.")] = 3,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from a checkpoint, or from the newest in a folder of them.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the summary.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Train nothing; say whether it fits, and what a step takes."),
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="With --dry-run: on this machine instead of here, as `patrickstar plan` knows machines."),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Train a causal language model on text, its model data within memory budgets."""
    with _told_errors(traceback):
        # Imported when it is needed: the libraries behind it take seconds, and --help shouldn't.
        from patrickstar._cli.train import dry_run_training
        from patrickstar._cli.train import train as run
        from patrickstar._cli.train_options import TrainOptions
        from patrickstar.errors import ConfigError

        options = TrainOptions(
            data=tuple(data or ()),
            model=model,
            vocab_size=vocab_size,
            sequence=sequence,
            batch=batch,
            accumulation=accumulation,
            steps=steps,
            lr=lr,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            max_norm=max_norm,
            precision=precision,
            device=device,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            disk_capacity=disk_capacity,
            chunk_size=chunk_size,
            activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
            seed=seed,
            log=log,
            save_every=save_every,
            save_to=save_to,
            keep=keep,
            resume=resume,
            quiet=quiet,
        )
        if dry_run:
            dry_run_training(options, Console(), machine)
            return
        if machine is not None:
            raise ConfigError(f"--machine {machine} is for --dry-run: a run takes the machine that it is on")
        summary = run(options, Console())
    if summary.interrupted:
        raise typer.Exit(_INTERRUPTED)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="A preset such as gpt-12b, a config.json, or a local model folder.")
    ] = "gpt-12b",
    machine: Annotated[
        str, typer.Option(help="One that comes with the package, such as 8xV100-32GB, a TOML file, or here.")
    ] = "8xV100-32GB",
    gpus: Annotated[int | None, typer.Option(min=1, help="How many of its GPUs. Default: all.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Of each GPU, instead of what it has.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of the host, instead of what it has.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per GPU. Default: what is fastest.")] = None,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens in a sample.")] = 1024,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Compute activations again in backward instead of keeping them. Default: what is faster.",
        ),
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Find the largest GPT that fits.")] = False,
    least_tflops: Annotated[float, typer.Option(min=0, help="With --largest: at this speed per GPU, at least.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Say whether a model fits a machine, how fast it would be, and where the time would go; nothing is run."""
    with _told_errors(traceback):
        from patrickstar._cli.plan import PlanOptions
        from patrickstar._cli.plan import plan as run

        options = PlanOptions(
            model=model,
            machine=machine,
            gpus=gpus,
            device_memory=device_memory,
            host_memory=host_memory,
            batch=batch,
            sequence=sequence,
            activation_checkpointing=activation_checkpointing,
            largest=largest,
            least_tflops=least_tflops,
            as_json=as_json,
        )
        run(options, Console())


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of patrickstar train, or a folder of them.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to be written: a new or an empty one.")],
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of its parameters.")] = "fp32",
    max_shard: Annotated[str, typer.Option(help="The largest file, such as 5GB.")] = "5GB",
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Make a model folder of a checkpoint: safetensors, config.json and the tokenizer, for any program."""
    with _told_errors(traceback):
        from patrickstar._cli.export import export as run

        run(checkpoint, folder, dtype, max_shard, Console())


@app.command()
def doctor(
    disk: Annotated[
        Path | None, typer.Option(help="A directory for the disk tier, whose disk is to be measured too.")
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Say what this machine and this installation offer, and what to do about what is missing."""
    with _told_errors(traceback):
        from patrickstar._cli.doctor import examine, print_findings

        print_findings(Console(), examine(disk=disk))


@contextmanager
def _told_errors(show_traceback: bool) -> Iterator[None]:
    """One line for whatever goes wrong: exit code 2 for what the user can change, 1 for what only we can."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted before the first step was done", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        expected = isinstance(error, PatrickStarError)
        if expected:
            message = f"error: {error}"
        else:
            message = f"internal error: {type(error).__name__}: {error}; this is a bug, --traceback shows where"
        typer.echo(message, err=True)
        raise typer.Exit(_USAGE_ERROR if expected else 1) from None
