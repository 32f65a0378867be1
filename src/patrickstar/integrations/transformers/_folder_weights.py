"""The values of a model's parameters, read from a folder one at a time, or a part at a time."""

import re
from pathlib import Path

import torch
from transformers import PreTrainedModel

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._key_mapping import find_sources, names_of_each
from patrickstar.integrations.transformers._model_folder import listed, tensors_of
from patrickstar.integrations.transformers._safetensors_reader import DTYPES, Source

_COMPARED_NUMEL = 1 << 20


class FolderWeights:
    """Reads a model's parameters by their names in the model; nothing stays in memory between two reads.

    Files may hold a tied parameter under any of its names. The model's persistent buffers are filled at once. Raises
    ModelError before that, naming them, where tensors are missing, surplus, or of another shape or kind.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        found = find_sources(model, tensors_of(folder))
        ignorable = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        state = model.state_dict()
        self._sources: dict[str, Source] = {}
        missing, unlike = [], []
        for names in names_of_each(model):
            own = state[names[0]]
            sources = [found.sources[name] for name in names if name in found.sources]
            if not sources:
                if own.is_meta or not any(re.search(pattern, names[0]) for pattern in ignorable):
                    missing.append(names[0])
                continue
            unlike += [f"{source} for {names[0]} ({_said(own)})" for source in sources if not _fits(source, own)]
            self._sources |= dict.fromkeys(names, sources[0])
        wrong = [
            f"{what}: {listed(names)}"
            for what, names in (("missing", missing), ("surplus", sorted(found.surplus)), ("of another kind", unlike))
            if names
        ]
        if wrong:
            raise ModelError(
                f"{folder} holds another model than its config.json and the model class say: {'; '.join(wrong)}"
            )
        self._check_tied(folder, model, found.sources)
        for name, buffer in model.named_buffers():
            if name in self._sources:
                buffer.copy_(self(name))

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of one parameter, in the dtype of the file."""
        source = self._sources[name]
        return self.part(name, 0, sum(piece.numel for piece in source.pieces)).view(source.shape)

    def part(self, name: str, first: int, numel: int) -> torch.Tensor:
        """`numel` of its elements from `first` on, in a row; nothing else is read."""
        return self._sources[name].read(first, numel)

    def _check_tied(self, folder: Path, model: PreTrainedModel, sources: dict[str, Source]) -> None:
        """Files that hold a tied parameter several times must hold the same each time."""
        for names in names_of_each(model):
            present = [name for name in names if name in sources]
            for other in present[1:]:
                if not _same(sources[present[0]], sources[other]):
                    raise ModelError(
                        f"{folder} holds {present[0]} and {other}, which its config.json ties to be one parameter, "
                        f"with different values; if they are two, set tie_word_embeddings to false there"
                    )


def _said(own: torch.Tensor) -> str:
    return f"{str(own.dtype).removeprefix('torch.')}, {list(own.shape)}"


def _fits(source: Source, own: torch.Tensor) -> bool:
    """Whether a value can be the model's: of its shape, and its dtype; floats may have another precision."""
    dtype = DTYPES.get(source.dtype)
    alike = dtype is not None and (dtype == own.dtype or (dtype.is_floating_point and own.is_floating_point()))
    return alike and source.shape == tuple(own.shape)


def _same(one: Source, other: Source) -> bool:
    numel = sum(piece.numel for piece in one.pieces)
    return one.dtype == other.dtype and all(
        torch.equal(*(source.read(at, min(_COMPARED_NUMEL, numel - at)).view(torch.uint8) for source in (one, other)))
        for at in range(0, numel, _COMPARED_NUMEL)
    )
