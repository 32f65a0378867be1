"""`Trainer.record(tensorboard=...)`: the values of the log of JSON lines, which a resumed training continues."""

from event_files import FIELDS, expected_scalars, scalars_in

from patrickstar._report.run_file import read_run

from .trainers import BUDGET, Stressed, arguments, close, gpt2, texts

TAGS = {tag for tag in FIELDS if tag.partition("/")[0] not in ("disk", "collectives", "staleness")}


def test_values_are_those_of_the_log(tmp_path):
    for steps, checkpoint in ((4, None), (6, str(tmp_path / "checkpoint-2"))):
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        trainer = Stressed(gpt2(), args, train_dataset=texts(), config=BUDGET)
        trainer.record(tmp_path / "log.jsonl", tensorboard=tmp_path / "events")
        trainer.train(resume_from_checkpoint=checkpoint)
        close(trainer)
        run, found = read_run(tmp_path / "log.jsonl"), scalars_in(tmp_path / "events")
        assert found == expected_scalars(run, TAGS)
        assert sorted(found["train/loss"]) == list(range(1, steps + 1))
