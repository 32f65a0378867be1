"""Weights of a model folder, read one parameter or one part at a time."""

import re
from pathlib import Path

import torch
from transformers import PreTrainedModel

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._key_mapping import find_sources, names_of_each
from patrickstar.integrations.transformers._model_folder import DTYPES, Source, listed, tensors_of

_COMPARED_NUMEL = 1 << 20


class FolderWeights:
    """Reader of a model's parameters by their names in the model, without a cache.

    Files may hold a tied parameter under any of its names. The constructor fills the model's persistent buffers; before
    that it raises ModelError with the names of tensors that are missing, unexpected, or of another shape or dtype.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        stored, unexpected = find_sources(model, tensors_of(folder))
        optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        state = model.state_dict()
        self._sources: dict[str, Source] = {}
        missing, mismatched = [], []
        for names in names_of_each(model):
            own = state[names[0]]
            sources = [stored[name] for name in names if name in stored]
            if not sources:
                if own.is_meta or not any(re.search(pattern, names[0]) for pattern in optional):
                    missing.append(names[0])
                continue
            mismatched += [f"{source} for {names[0]} ({_format(own)})" for source in sources if not _fits(source, own)]
            self._sources |= dict.fromkeys(names, sources[0])
        groups = {"missing": missing, "unexpected": sorted(unexpected), "mismatched": mismatched}
        problems = [f"{label}: {listed(names)}" for label, names in groups.items() if names]
        if problems:
            raise ModelError(
                f"the tensors in {folder} do not match its config.json and the model class: {'; '.join(problems)}"
            )
        self._check_tied(folder, model, stored)
        for name, buffer in model.named_buffers():
            if name in self._sources:
                buffer.copy_(self(name))

    def __call__(self, name: str) -> torch.Tensor:
        """Read one parameter, in the dtype of the file."""
        source = self._sources[name]
        return self.part(name, 0, sum(piece.numel for piece in source.pieces)).view(source.shape)

    def part(self, name: str, first: int, numel: int) -> torch.Tensor:
        """Read only `numel` elements from `first`, as a flat tensor."""
        return self._sources[name].read(first, numel)

    def _check_tied(self, folder: Path, model: PreTrainedModel, sources: dict[str, Source]) -> None:
        for names in names_of_each(model):
            present = [name for name in names if name in sources]
            for other in present[1:]:
                if not _same(sources[present[0]], sources[other]):
                    raise ModelError(
                        f"{folder} holds {present[0]} and {other}, which its config.json ties to one parameter, with "
                        f"different values; if they are separate parameters, set tie_word_embeddings to false there"
                    )


def _format(own: torch.Tensor) -> str:
    return f"{str(own.dtype).removeprefix('torch.')}, {list(own.shape)}"


def _fits(source: Source, own: torch.Tensor) -> bool:
    """Return whether shape and dtype match those of the model; floats may differ in precision."""
    dtype = DTYPES.get(source.dtype)
    compatible = dtype is not None and (dtype == own.dtype or (dtype.is_floating_point and own.is_floating_point()))
    return compatible and source.shape == tuple(own.shape)


def _same(first: Source, other: Source) -> bool:
    numel = sum(piece.numel for piece in first.pieces)
    return first.dtype == other.dtype and all(
        torch.equal(*(src.read(begin, min(_COMPARED_NUMEL, numel - begin)).view(torch.uint8) for src in (first, other)))
        for begin in range(0, numel, _COMPARED_NUMEL)
    )
