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
from patrickstar.integrations.transformers.stored import Source, Stored

# [Note: names in files]
# Files hold names of their time: without the base model's prefix, LayerNorm.gamma, one tensor per expert. transformers
# keeps rules for each kind of model that rename these as it loads, and operations that join or cut tensors. The rules
# are applied here as there, by its own functions. Of the operations only those are done that put tensors one after the
# other, element by element: then every stretch of a parameter's elements lies in a stretch of a file. These are the
# stacks of experts, with gate and up projection side by side in each.

_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files hold; transformers passes these over in files of any model that computes them."""


@dataclass(frozen=True)
class Found:
    """What a model's names are in files. surplus: keys that are nothing of the model's, and not to be passed over."""

    sources: dict[str, Source]
    surplus: list[str]


def find_sources(model: PreTrainedModel, stored: Mapping[str, Stored]) -> Found:
    """See [Note: names in files]. Raises ModelError for tensors that only transformers itself can join or cut."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own = model.state_dict()
    sources: dict[str, Source] = {}
    parts: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
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


def _joined(name: str, rule: WeightConverter, found: Mapping[str, list[Stored]], model: PreTrainedModel) -> Source:
    """A parameter that files hold in several tensors, whose elements follow one another in it."""
    stacks = [found[pattern] for pattern in rule.source_patterns if pattern in found]
    tensors = [*chain(*stacks)]
    first = tensors[0]
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in rule.operations]
    alike = all(one.dtype == first.dtype and one.shape[1:] == first.shape[1:] and one.shape for one in tensors)
    if alike and len(rule.target_patterns) == 1:
        rows = sum(one.shape[0] for one in tensors)
        if operations == [(MergeModulelist, 0)] and all(one.shape == first.shape for one in tensors):
            return Source(tuple(tensors), (len(tensors), *first.shape))
        if operations == [(MergeModulelist, 0), (Concatenate, 1)] and len({len(stack) for stack in stacks}) == 1:
            turns = tuple(chain(*zip(*stacks, strict=True)))
            return Source(turns, (len(stacks[0]), rows // len(stacks[0]), *first.shape[1:]))
        if operations == [(Concatenate, 0)]:
            return Source(tuple(tensors), (rows, *first.shape[1:]))
    raise ModelError(
        f"parameter {name!r} is {len(tensors)} tensors in the files ({first.key}, ...), which only transformers can "
        f"put together ({', '.join(kind.__name__ for kind, _ in operations)}); convert the folder once: "
        f"{type(model).__name__}.from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
    )


def names_of_each(model: nn.Module) -> list[list[str]]:
    """All names of each parameter and persistent buffer, the model's first one first."""
    names: dict[int, list[str]] = defaultdict(list)
    state = model.state_dict(keep_vars=True)
    for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        if isinstance(state.get(name), torch.Tensor):
            names[id(state[name])].append(name)
    return list(names.values())
