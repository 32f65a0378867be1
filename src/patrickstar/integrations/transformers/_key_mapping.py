"""Mapping from the tensors in a folder's files to a model's parameters and buffers, by transformers' rules."""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._model_folder import Source, TensorInFile, listed

# [Note: tensor names in files]
# Files may hold names of older versions: without the base model's prefix, LayerNorm.gamma, one tensor per expert.
# transformers has rules per model type that rename these while loading, and operations that join or split tensors. The
# rules are applied here with the functions of transformers. Supported operations are those that only concatenate the
# elements of tensors, so that each range of a parameter's elements is a range in a file: stacks of experts, each with
# its gate and up projections concatenated.

_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in older files; transformers ignores them if the model computes them."""

_STACKED = [(MergeModulelist, 0)]
_STACKED_AND_CONCATENATED = [(MergeModulelist, 0), (Concatenate, 1)]
_CONCATENATED = [(Concatenate, 0)]


def find_sources(model: PreTrainedModel, stored: Mapping[str, TensorInFile]) -> tuple[dict[str, Source], list[str]]:
    """Return the source of each tensor of the model, and the keys in files that the model neither has nor ignores.

    See [Note: tensor names in files]. Raises ModelError if only transformers can convert a tensor.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own = model.state_dict()
    sources: dict[str, Source] = {}
    parts: dict[str, dict[str, list[TensorInFile]]] = defaultdict(lambda: defaultdict(list))
    unexpected = []
    ignored = _ignored(model)
    prefix = model.base_model_prefix
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own or name in sources:
            if not ignored.search(name):
                unexpected.append(key)
        elif pattern is None:
            sources[name] = Source((stored[key],), stored[key].shape)
        else:
            parts[name][pattern].append(stored[key])
    for name, by_source in parts.items():
        if name in sources:
            unexpected += [tensor.key for tensor in chain(*by_source.values())]
        else:
            sources[name] = _joined(name, by_pattern[next(iter(by_source))], by_source, model)
    return sources, unexpected


def _ignored(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern of names in files that the model class ignores or computes itself."""
    persistent = model.state_dict().keys()
    computed = [rf"^{re.escape(name)}$" for name, _ in model.named_buffers() if name not in persistent]
    declared = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return re.compile("|".join(f"({pattern})" for pattern in (*_ALWAYS_IGNORED, *computed, *declared)))


def _joined(
    name: str, rule: WeightConverter, by_source: Mapping[str, list[TensorInFile]], model: PreTrainedModel
) -> Source:
    """Return the source of a parameter that concatenates several tensors of the files."""
    stacks = [by_source[pattern] for pattern in rule.source_patterns if pattern in by_source]
    tensors = [*chain(*stacks)]
    first = tensors[0]
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in rule.operations]
    label = f"parameter {name!r} is stored in {first.file.parent} as {listed([tensor.key for tensor in tensors], 2)}"
    if operations not in (_STACKED, _STACKED_AND_CONCATENATED, _CONCATENATED) or len(rule.target_patterns) > 1:
        # If the rule keeps the name, a converted folder would look the same, so conversion is no remedy.
        keeps_name = first.key.endswith(name) or name.endswith(first.key)
        conversion = (
            f"{type(model).__name__}.from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
        )
        raise ModelError(
            f"{label}, which only transformers can convert ({', '.join(kind.__name__ for kind, _ in operations)})"
            + ("; " if keeps_name else f"; convert the folder once: {conversion}; or ")
            + "pass the model that transformers' own from_pretrained returns to patrickstar.initialize"
        )
    alike = all(other.dtype == first.dtype and other.shape and other.shape[1:] == first.shape[1:] for other in tensors)
    even = len({len(stack) for stack in stacks}) == 1 and all(
        tensor.shape == stack[0].shape for stack in stacks for tensor in stack
    )
    if not alike or not (even or operations == _CONCATENATED):
        raise ModelError(f"{label}, which do not match each other: the folder is incomplete or of another model")
    rows = sum(tensor.shape[0] for tensor in tensors)
    if operations == _STACKED:
        return Source(tuple(tensors), (len(tensors), *first.shape))
    if operations == _STACKED_AND_CONCATENATED:
        interleaved = chain(*zip(*stacks, strict=True))
        return Source(tuple(interleaved), (len(stacks[0]), rows // len(stacks[0]), *first.shape[1:]))
    return Source(tuple(tensors), (rows, *first.shape[1:]))


def names_of_each(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter and persistent buffer, in the model's order."""
    names: dict[int, list[str]] = defaultdict(list)
    state = model.state_dict(keep_vars=True)
    for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        if isinstance(state.get(name), torch.Tensor):
            names[id(state[name])].append(name)
    return list(names.values())
