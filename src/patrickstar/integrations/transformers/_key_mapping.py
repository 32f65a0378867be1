"""Which tensors of a folder's files a model's parameters and buffers are, after transformers' rules."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
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
from patrickstar.integrations.transformers._model_folder import listed
from patrickstar.integrations.transformers._safetensors_reader import Source, TensorInFile

# [Note: names in files]
# Files hold names of their time: without the base model's prefix, LayerNorm.gamma, one tensor per expert. transformers
# keeps rules for each kind of model that rename these as it loads, and operations that join or cut tensors. The rules
# are applied here as there, by its own functions. Of the operations only those are done that put tensors one after the
# other, element by element: then every stretch of a parameter's elements lies in a stretch of a file. These are the
# stacks of experts, with gate and up projection side by side in each.

_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files hold; transformers passes these over in files of any model that computes them."""

_STACKED = [(MergeModulelist, 0)]
_STACKED_SIDE_BY_SIDE = [(MergeModulelist, 0), (Concatenate, 1)]
_IN_A_ROW = [(Concatenate, 0)]


@dataclass(frozen=True)
class Found:
    """What a model's names are in files. surplus: keys that are nothing of the model's, and not to be passed over."""

    sources: dict[str, Source]
    surplus: list[str]


def find_sources(model: PreTrainedModel, stored: Mapping[str, TensorInFile]) -> Found:
    """See [Note: names in files]. Raises ModelError for tensors that only transformers itself can join or cut."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own = model.state_dict()
    sources: dict[str, Source] = {}
    parts: dict[str, dict[str, list[TensorInFile]]] = defaultdict(lambda: defaultdict(list))
    surplus = []
    ignored = _ignored(model)
    prefix = model.base_model_prefix
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own or name in sources:
            if not ignored.search(name):
                surplus.append(key)
        elif pattern is None:
            sources[name] = Source((stored[key],), stored[key].shape)
        else:
            parts[name][pattern].append(stored[key])
    for name, found in parts.items():
        if name in sources:
            surplus += [one.key for one in chain(*found.values())]
        else:
            sources[name] = _joined(name, by_pattern[next(iter(found))], found, model)
    return Found(sources, surplus)


def _ignored(model: nn.Module) -> re.Pattern[str]:
    """Names in files that the model's class declares to be of no use, or that it computes itself."""
    persistent = model.state_dict().keys()
    computed = [rf"^{re.escape(name)}$" for name, _ in model.named_buffers() if name not in persistent]
    declared = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return re.compile("|".join(f"({pattern})" for pattern in (*_ALWAYS_IGNORED, *computed, *declared)))


def _joined(
    name: str, rule: WeightConverter, found: Mapping[str, list[TensorInFile]], model: PreTrainedModel
) -> Source:
    """A parameter that files hold in several tensors, whose elements follow one another in it."""
    stacks = [found[pattern] for pattern in rule.source_patterns if pattern in found]
    tensors = [*chain(*stacks)]
    first = tensors[0]
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in rule.operations]
    what = f"parameter {name!r} lies in {first.file.parent} as {listed([one.key for one in tensors], 2)}"
    if operations not in (_STACKED, _STACKED_SIDE_BY_SIDE, _IN_A_ROW) or len(rule.target_patterns) > 1:
        # After a rule that keeps the name a folder is of the same look, whatever it holds.
        keeps_name = first.key.endswith(name) or name.endswith(first.key)
        saved = (
            f"{type(model).__name__}.from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
        )
        raise ModelError(
            f"{what}, and only transformers can make it of that ({', '.join(kind.__name__ for kind, _ in operations)})"
            + ("; " if keeps_name else f"; convert the folder once: {saved}; or ")
            + "give patrickstar.initialize the model that transformers' own from_pretrained returns"
        )
    alike = all(one.dtype == first.dtype and one.shape and one.shape[1:] == first.shape[1:] for one in tensors)
    even = len({len(stack) for stack in stacks}) == 1 and all(
        one.shape == stack[0].shape for stack in stacks for one in stack
    )
    if not alike or not (even or operations == _IN_A_ROW):
        raise ModelError(f"{what}, which do not fit each other: the folder is not complete, or not of this model")
    rows = sum(one.shape[0] for one in tensors)
    if operations == _STACKED:
        return Source(tuple(tensors), (len(tensors), *first.shape))
    if operations == _STACKED_SIDE_BY_SIDE:
        turns = chain(*zip(*stacks, strict=True))
        return Source(tuple(turns), (len(stacks[0]), rows // len(stacks[0]), *first.shape[1:]))
    return Source(tuple(tensors), (rows, *first.shape[1:]))


def names_of_each(model: nn.Module) -> list[list[str]]:
    """All names of each parameter and persistent buffer, the model's first one first."""
    names: dict[int, list[str]] = defaultdict(list)
    state = model.state_dict(keep_vars=True)
    for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        if isinstance(state.get(name), torch.Tensor):
            names[id(state[name])].append(name)
    return list(names.values())
