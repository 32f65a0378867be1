# ruff: noqa: F401  The page uses these names.
import functools
from dataclasses import dataclass

import torch
from docs.samples import LossModel, engine_of, vectors

engine = engine_of(LossModel)
optimizer, loss = engine.optimizer, engine(vectors()[0])
