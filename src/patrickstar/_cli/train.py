"""The command ``patrickstar train``: train a language model on text with an ordinary training loop."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import patrickstar as ps
from patrickstar._autograd.recomputed_layers import chosen_activations
from patrickstar._checkpoint.metadata import precision_of
from patrickstar._cli.console import print_row, print_text
from patrickstar._cli.corpus import Corpus, open_corpus
from patrickstar._cli.first_step_notice import NOTICE_S
from patrickstar._cli.parallelism import Parallelism
from patrickstar._cli.progress import LEGEND, Progress, print_summary
from patrickstar._cli.run_checkpoints import ResumeOptions, RunMetadata
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.summary import Summary
from patrickstar._cli.time_limit import TimeLimit
from patrickstar._cli.tokenizer import load_tokens
from patrickstar._cli.train_options import TrainOptions
from patrickstar._cli.training_setup import training_config
from patrickstar._distributed.process_group import World
from patrickstar._dry_run.precision_choice import PrecisionChoice, settle_precision
from patrickstar._engine.initialize import check_fit, create_engine
from patrickstar._engine.recording import Recording
from patrickstar._engine.run_log import RunLog, StepRecord
from patrickstar._engine.tensorboard_log import summary_writer
from patrickstar._hardware.machine_name import machine_name
from patrickstar._hardware.sigint_gate import uninterruptible
from patrickstar._models.model_source import ModelSource, find_model
from patrickstar.errors import CheckpointError, TrainingError
from patrickstar.integrations._meshes import MeshSizes

# The cosine ends at this fraction of the peak learning rate, not at 0, so that the last steps still learn.
_FINAL_FRACTION = 0.1
# Single losses are noisy, so the summary averages the first and last losses over this many steps, if there are as many.
_MEAN_STEPS = 3


def learning_rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Return the learning rate factor of a step, counted from 0: linear warm-up, then cosine decay."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return _FINAL_FRACTION + (1 - _FINAL_FRACTION) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def train(options: TrainOptions, console: Console) -> Summary | None:
    """Train with a progress display, and print and return the summary.

    Ctrl-C ends the run with a summary of the completed steps. Processes that torchrun has restarted after the last
    step was saved return None.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first step was completed.
        CheckpointError: The last checkpoint could not be written, or the one to resume cannot be used.
        PatrickStarError: Options, data or model cannot be used, or a loss is not finite.
    """
    limit = TimeLimit(options.minutes)
    config = training_config(options)
    device = config.find_device()
    world = World.find(device)
    rank, alone = world.rank, world.size == 1
    if rank:  # only rank 0 prints and logs
        console, options = Console(quiet=True), replace(options, log=None, tensorboard=None, quiet=True)
    if options.tensorboard is not None:
        summary_writer()  # refused before the model is built if it is not installed
    source = find_model(options.model, options.vocab_size)
    source.check_sequence(options.sequence)
    parallelism = Parallelism.of(options, source, world, device.type)
    resume = ResumeOptions.of(options, world)
    build = source.to_meta()
    choices: list[PrecisionChoice] = []
    if config.precision == "auto" and resume.resumed is not None:
        config = config.with_precision(precision_of(resume.resumed))
        choices.append(PrecisionChoice(config.precision, f"{resume.resumed} was trained in it"))
    config = settle_precision(config, build, device, world, say=choices.append)
    if alone:
        check_fit(build, config, source.example(options.batch, options.sequence))
    corpus = open_corpus(options.data)
    if resume.step >= options.steps:
        print_text(console, f"{resume.resumed} was saved after the last step: nothing is left to do")
        return None
    with RunLog(options.log, 0 if resume.resumed is None else resume.step) as log:
        if not options.quiet:
            _print_header(console, source, corpus, parallelism.sizes, choices)
        if rank:
            world.all_gather_object(None)  # wait until rank 0 has cached tokenizer and tokens
        tokens = load_tokens(corpus, source.vocabulary)
        if not rank:
            world.all_gather_object(None)
        batches = BatchSampler(
            tokens, options.sequence, options.batch, options.seed, parallelism.data_rank, parallelism.sizes.data
        )
        torch.manual_seed(options.seed)
        model, weights = source.open() if resume.resumed is None else source.open_empty()
        engine = create_engine(parallelism.divide(model), config, weights, world, parallelism.mesh)
        if engine.data_rank:
            torch.manual_seed(options.seed + engine.data_rank)  # dropout differs between batches, not within one
        try:
            metadata = None
            if resume.every:
                metadata = RunMetadata.of(options, source, engine.module, corpus, resume.agents)
            run = _TrainingRun(options, source, engine, batches, resume, metadata, limit)
            if resume.resumed is not None:
                run.resume(resume.resumed)
                if not options.quiet:
                    print_text(console, f"resumed from {resume.resumed}")
            shown = Progress(
                console,
                options.steps,
                engine.device_budget_bytes,
                limit,
                done=run.step,
                notice=_first_step_notice(options, engine),
                quiet=options.quiet,
            )
            with (
                shown as progress,
                engine.record(log, steps=run.step, tensorboard=options.tensorboard) as recording,
            ):
                records, unfinished_s = _training_loop(run, recording, progress)
            engine.finish_saving()
            summary = _summary(run, records, unfinished_s)
            log.write("summary", asdict(summary))
            print_summary(console, summary)
            _print_files(console, options, resume)
            if run.lost:
                raise CheckpointError(
                    f"the checkpoint after step {run.step}, the last one, was not written, for the reason in the "
                    f"warning above: what was trained since the checkpoint before it is lost"
                )
        finally:
            engine.close(keep=False)
    return summary


def _print_header(
    console: Console, source: ModelSource, corpus: Corpus, sizes: MeshSizes, choices: Sequence[PrecisionChoice]
) -> None:
    file = source.vocabulary.file
    origin = f"tokenizer {file}" if file else f"a byte-pair tokenizer of {source.vocabulary.size} tokens trained on it"
    text = f"{source.name} on {corpus.name} ({len(corpus.paths)} files), {origin}"
    if sizes.world > 1:
        text += f"\n{sizes}"
    print_text(console, "\n".join((text, *map(str, choices), LEGEND)))


def _durable_text(every: int) -> str:
    """Describe the checkpoints of a durable run, and what a crash loses."""
    if every == 1:
        return "after each step; a crash loses the step that runs, and at most the one before"
    return (
        f"after every {every} steps: a checkpoint writes the states in memory again, which is so at most 3 % of what "
        f"steps write; a crash loses at most {every + 1} steps; --save-every 1 saves each one"
    )


def _print_files(console: Console, options: TrainOptions, resume: ResumeOptions) -> None:
    if options.log is not None:
        print_row(console, "log", f"{options.log}; in a browser: patrickstar report {options.log}")
    if resume.checkpoints is not None and resume.checkpoints.newest() is not None:
        folder = resume.checkpoints.directory
        print_row(
            console, "checkpoints", f"{folder}; --resume {folder} continues, patrickstar export makes a model folder"
        )


def _first_step_notice(options: TrainOptions, engine: ps.Engine) -> str:
    tokens = options.batch * options.sequence * options.accumulation
    measured = "" if options.precision == "auto" else "--precision auto, which takes what is fast on this machine; "
    return (
        f"the first step has taken {NOTICE_S:.0f} s and still runs: {tokens:,} tokens through "
        f"{sum(param.numel() for param in engine.parameters()):,} parameters in {engine.config.precision} on "
        f"{engine.device.type}; it also records the accesses by which later steps are planned. If it takes too long, "
        f"end it with Ctrl-C and try: {measured}a smaller --batch, --sequence or --model; `patrickstar doctor` shows "
        f"the rates of this machine"
    )


class _TrainingRun:
    """Training run, with its state that checkpoints store beside the engine's."""

    def __init__(
        self,
        options: TrainOptions,
        source: ModelSource,
        engine: ps.Engine,
        batches: BatchSampler,
        resume: ResumeOptions,
        metadata: RunMetadata | None,
        limit: TimeLimit,
    ) -> None:
        self.options, self.source = options, source
        self.engine = engine
        self._limit = limit
        self.out_of_time = False
        """True once the limit on the run's time has ended it before its last step."""
        self.step = 0
        """Number of completed steps."""
        self.lost = False
        """True if the checkpoint after the last step could not be written."""
        self.batches, self._resume, self._metadata = batches, resume, metadata
        factor = partial(learning_rate_factor, warmup_steps=options.warmup_steps, steps=options.steps)
        self.scheduler = LambdaLR(engine.optimizer, factor)
        self._saved = 0
        self._durable_every: int | None = None
        """Steps between checkpoints of a durable run, None if they are given."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of completed steps and the metadata to rebuild the model."""
        assert self._metadata is not None, "metadata is created if checkpoints are enabled"
        return self._metadata.after(self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = self._saved = int(state["step"])

    @property
    def _state(self) -> dict[str, Any]:
        return {"run": self, "batches": self.batches, "scheduler": self.scheduler}

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. Raise CheckpointError if it belongs to another run."""
        self.engine.load(checkpoint, self._state)

    def note_time(self, step_s: float) -> None:
        """End the run if no step of `step_s` seconds fits into its time; all processes decide so together."""
        if self._limit.minutes is not None and self.step < self.options.steps:
            self.out_of_time = self.engine.average(self._limit.is_due(step_s)) > 0

    def note_placement(self) -> int | None:
        """Set the steps between checkpoints of a durable run from where states are; return them if they change."""
        if not self.options.durable or self.options.save_every:
            return None
        before, self._durable_every = self._durable_every, self.engine.inspect().durable_every
        self._durable_every = max(self.engine.world.all_gather_object(self._durable_every))
        return self._durable_every if self._durable_every != before else None

    def save_if_due(self) -> None:
        """Write a checkpoint if one is due: in the background, except after the last step."""
        last = self.step == self.options.steps or self.out_of_time
        checkpoints, every = self._resume.checkpoints, self._resume.every
        if checkpoints is None:
            return
        due = self.step % every == 0 if self._durable_every is None else self.step >= self._saved + self._durable_every
        if (due or last) and self.step > self._saved:
            self.lost = not checkpoints.save(self.engine, self.step, self._state, wait=last)
            self._saved = self.step


def _training_loop(
    run: _TrainingRun, recording: Recording, progress: Progress
) -> tuple[list[StepRecord], float | None]:
    """Run the remaining steps. Return their records, and the seconds of the step that Ctrl-C interrupted, if any."""
    options, engine = run.options, run.engine
    tokens = options.batch * options.sequence * options.accumulation * engine.data_size
    records: list[StepRecord] = []
    batches, started = iter(run.batches), time.perf_counter()
    try:
        while run.step < options.steps and not run.out_of_time:
            started = time.perf_counter()
            learning_rate = float(run.scheduler.get_last_lr()[0])
            loss, norm = _gradients(run, batches)
            with uninterruptible():  # a step whose update has begun is in the log and in the summary
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                run.scheduler.step()
                run.step += 1
                record = recording.log(
                    loss=loss,
                    learning_rate=learning_rate,
                    gradient_norm=norm,
                    tokens=tokens,
                    elapsed_s=time.perf_counter() - started,
                )
                records.append(record)
            progress.show(record)
            run.note_time(record.elapsed_s)
            if (every := run.note_placement()) is not None:
                progress.note("checkpoints", _durable_text(every))
            run.save_if_due()
    except KeyboardInterrupt:
        if not records:
            raise
        return records, time.perf_counter() - started
    return records, None


def _gradients(run: "_TrainingRun", batches: Iterator[torch.Tensor]) -> tuple[float, float | None]:
    """Compute the gradients of the next step. Return its mean loss, and their norm if they are clipped."""
    options, engine, step = run.options, run.engine, run.step + 1
    losses = []
    for number in range(options.accumulation):
        seed = options.seed, step, number, engine.data_rank
        loss = engine(**run.source.inputs(next(batches), *seed)).loss
        losses.append(engine.average(loss.item()))
        if not math.isfinite(losses[-1]):
            raise TrainingError(
                f"the loss is {losses[-1]} in step {step}; try a lower --lr than {options.lr:g}, "
                "more --warmup-steps or --precision bf16"
            )
        engine.backward(loss / options.accumulation, accumulate=number < options.accumulation - 1)
    norm = engine.clip_grad_norm_(options.max_norm).item() if options.max_norm > 0 else None
    return sum(losses) / len(losses), norm


def _summary(run: _TrainingRun, records: list[StepRecord], unfinished_s: float | None) -> Summary:
    options, engine = run.options, run.engine
    layout, config = engine.layout, engine.config
    losses = [record.loss for record in records if record.loss is not None]
    timed, loss_steps = records[1:] or records, max(1, min(_MEAN_STEPS, len(losses) // 2))
    return Summary(
        model=options.model,
        parameters=sum(param.numel() for param in engine.parameters()),
        machine=machine_name(engine.device),
        device=engine.device.type,
        precision=config.precision,
        steps=len(records),
        interrupted=unfinished_s is not None,
        unfinished_s=unfinished_s or 0.0,
        minutes=options.minutes if run.out_of_time else None,
        loss_first=fmean(losses[:loss_steps]),
        loss_last=fmean(losses[-loss_steps:]),
        loss_steps=loss_steps,
        tokens_per_s=sum(record.tokens or 0 for record in timed) / sum(record.elapsed_s for record in timed),
        elapsed_s=sum(record.elapsed_s for record in records),
        model_data_bytes=layout.model_data_bytes,
        padding_bytes=layout.padding_bytes,
        chunk_count=layout.chunk_count,
        chunk_numel=layout.chunk_numel,
        device_budget_bytes=engine.device_budget_bytes,
        host_budget_bytes=engine.host_budget_bytes,
        processes=engine.world.size,
        tp=options.tp,
        ep=options.ep,
        replicas=options.replicas,
        stats=engine.stats.total,
        activations=chosen_activations(config) if options.checkpointing_share == "auto" else "",
    )
