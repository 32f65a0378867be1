"""Arguments of Trainers whose names depend on the version of transformers."""

import dataclasses

from transformers import TrainingArguments


def checkpointing(enabled):
    """Return the arguments of a Trainer with or without activation checkpointing, by their names in this version."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: enabled} | ({f"{name}_kwargs": {"use_reentrant": False}} if enabled else {})
