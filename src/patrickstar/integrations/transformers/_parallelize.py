"""Tensor and expert parallelism of transformers models, by the plans that transformers has for them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from patrickstar.errors import ConfigError, ModelError

# [Note: plans of transformers]
# A plan maps names of modules and parameters, with `*` for the number of a layer, to styles. A style makes a parameter
# a DTensor, or replaces the `forward` of a module by one that redistributes inputs and outputs. transformers'
# `from_pretrained(distributed_config=...)` applies both plans and then FSDP2, which the engine replaces. So the two
# functions that it calls for tensor and for expert parallelism are called here by themselves.

EXCHANGE = "all_to_all"
"""How tokens reach their experts, by transformers' name.

Its default, "auto", sums over the experts' processes instead in forwards without gradients, if all of them have the
same batch. Reentrant checkpointing runs such a forward and recomputes with gradients: in another order of additions.
"""
ATTENTION = ("q_proj", "k_proj")
"""Layers whose output is one vector of `head_dim` per attention head, as models with plans name them."""
STACKED = "grouped_gemm"
"""Style that shards a parameter by its first dimension, the expert."""


def parallelize(
    model: PreTrainedModel,
    *,
    tp: DeviceMesh | None = None,
    ep: DeviceMesh | None = None,
    tp_plan: Mapping[str, str] | None = None,
    ep_plan: Mapping[str, str] | None = None,
) -> None:
    """Make parameters of a transformers model DTensors, in place and before `patrickstar.initialize`.

    Every process must call this with a model of the same weights, or on the meta device. Nothing is sent but checksums:
    each process keeps its own part of what it has.

    Args:
        model: Model of transformers, whose configuration has the plans.
        tp: 1-D mesh of the processes that share a batch and hold slices of dense layers. Default None: no others.
        ep: 1-D mesh of the processes that together hold all experts; consists of whole `tp` meshes. Default None: every
            process holds all experts, or slices of them if the tensor-parallel plan says so.
        tp_plan: Rules that replace or extend those of the model, as `{"model.layers.*.mlp.up_proj": "colwise"}`. An
            empty mapping: no rules.
        ep_plan: The same for experts. Modules with such a rule have none of `tp_plan`.

    Raises:
        ConfigError: transformers has no plan for the model, a rule is unknown, or heads or experts can't be divided.
        ModelError: The model is parallel already, its weights differ between processes, or the rules for the names of a
            tied parameter differ.
    """
    _check_plain(model)
    tp, ep = _with_others("tp", tp), _with_others("ep", ep)
    expert_rules = {} if ep is None else _rules(model, "ep", model.ep_plan, ep_plan)
    dense_rules = {} if tp is None else _rules(model, "tp", model.tp_plan, tp_plan)
    dense_rules = {name: style for name, style in dense_rules.items() if not _belongs(name, expert_rules)}
    with _untied(model) as tied:
        dense, experts = model._expand_parallel_plan(dense_rules), model._expand_parallel_plan(expert_rules)
        _check_tied(tied, dense)
        if tp is not None:
            _check_heads(model, dense, tp.size())
        if ep is not None:
            _check_experts(model, experts, ep.size())
            batch_mesh = _batch_mesh(tp, ep)
        if tp is not None or ep is not None:
            _check_same_weights(model)
        if tp is not None:
            apply_tensor_parallelism(model, tp, dense)
        if ep is not None:
            apply_expert_parallelism(model, ep, batch_mesh, experts, EXCHANGE)
        _check_same_placements(model, tied)


def _check_plain(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is no model of transformers: use PyTorch's parallelize_module for its layers"
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ModelError(
                f"parameter {name!r} is a DTensor already, {param.placements} on {param.device_mesh}: call parallelize "
                f"once, on a model that was loaded without distributed_config"
            )


def _with_others(name: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return a mesh of several processes, None if it has only one."""
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise ConfigError(f"{name} has {mesh.ndim} dimensions, {mesh}: pass one of them, as mesh[{name!r}]")
    return mesh if mesh.size() > 1 else None


def _batch_mesh(tp: DeviceMesh | None, ep: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the processes with one batch; transformers needs it even if it is a single process."""
    if tp is None:
        return init_device_mesh(ep.device_type, (dist.get_world_size(), 1), mesh_dim_names=("data", "tp"))["tp"]
    tensor_ranks, expert_ranks = (dist.get_process_group_ranks(mesh.get_group()) for mesh in (tp, ep))
    if not set(tensor_ranks) <= set(expert_ranks):
        raise ConfigError(
            f"ep has the ranks {expert_ranks} and only a part of {tensor_ranks}, those of tp: an expert group consists "
            f"of whole tensor groups"
        )
    return tp


def _rules(
    model: PreTrainedModel, kind: str, plan: Mapping[str, str], override: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the rules of the model's plan and of `override`, which has precedence."""
    if override is not None and not override:
        return {}
    override = override or {}
    named = chain(model.named_modules(), model.named_parameters())
    names = {replace_layer_number_by_wildcard(name) for name, _ in named} - {""}
    for name, style in override.items():
        if style not in ALL_PARALLEL_STYLES:
            raise ConfigError(f"{kind}_plan: there is no style {style!r}, only {', '.join(ALL_PARALLEL_STYLES)}")
        if name not in names:
            raise ConfigError(
                f"{kind}_plan: {type(model).__name__} has no module or parameter {name!r}; names have * for the number "
                f"of a layer, as {max(names, key=len)!r}"
            )
    rules = {**plan, **override}
    if rules:
        return rules
    kinds = {
        "tp": ("tensor", "leave out tp, and make its layers parallel with PyTorch's parallelize_module"),
        "ep": ("expert", "call stack_experts before, if it is a Switch Transformers model, or leave out ep"),
    }
    kind_name, advice = kinds[kind]
    raise ConfigError(
        f"transformers has no {kind_name}-parallel plan for {type(model).__name__}: pass {kind}_plan, or {advice}"
    )


def _belongs(name: str, rules: Mapping[str, str]) -> bool:
    """Return whether a rule has this name, or the name of a module around it."""
    return any(name == rule or name.startswith(f"{rule}.") for rule in rules)


def _check_heads(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Check that processes hold whole attention heads, which the forward of attention counts by their width."""
    for prefix, attention in model.named_modules():
        head_dim = getattr(attention, "head_dim", None)
        for key, layer in attention.named_children():
            name = f"{prefix}.{key}"
            if key not in ATTENTION or plan.get(name) != "colwise" or not isinstance(head_dim, int):
                continue
            heads, rest = divmod(layer.out_features, head_dim)
            if heads % size and not rest:
                raise ConfigError(
                    f"{name!r} computes {heads} heads, which the {size} processes of tp can't divide evenly: choose a "
                    f"tp that divides the number of heads"
                )


def _check_experts(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    for name, param in model.named_parameters():
        if plan.get(name) == STACKED and param.shape[0] % size:
            raise ConfigError(
                f"{name!r} has {param.shape[0]} experts, which the {size} processes of ep can't divide evenly: choose "
                f"an ep that divides the number of experts"
            )


def _check_tied(tied: Mapping[str, str], plan: Mapping[str, str]) -> None:
    for name, first in tied.items():
        if (name in plan) != (first in plan):
            rule, other = (name, first) if name in plan else (first, name)
            raise ModelError(
                f"{name!r} and {first!r} are one parameter, and the plan has the rule {plan[rule]!r} for {rule!r} and "
                f"none for {other!r}: untie them (tie_word_embeddings=False), or pass rules for both in tp_plan"
            )


def _check_same_placements(model: nn.Module, tied: Mapping[str, str]) -> None:
    for name, first in tied.items():
        placements = [getattr(model.get_parameter(each), "placements", None) for each in (name, first)]
        if placements[0] != placements[1]:
            raise ModelError(
                f"the tied parameter is {placements[0]} as {name!r} and {placements[1]} as {first!r}: build the model "
                f"again, and pass rules with the same placement in tp_plan"
            )


def _check_same_weights(model: nn.Module) -> None:
    params = {name: param.detach() for name, param in model.named_parameters() if not param.is_meta}
    own = {name: torch.hash_tensor(param).view(torch.int64).item() for name, param in params.items()}
    hashes: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(hashes, own)
    for name in own:
        if any(other.get(name) != own[name] for other in hashes):
            raise ModelError(
                f"parameter {name!r} has other values in other processes: build the model after the same "
                f"torch.manual_seed in all of them, or load the same weights"
            )


@contextmanager
def _untied(model: nn.Module) -> Iterator[dict[str, str]]:
    """Give each name of a tied parameter a Parameter of its own with the same memory, and tie them again at the end.

    transformers looks up parameters by each of their names, and `named_parameters` has only the first.

    Yields:
        The first name of each parameter, by its other names.
    """
    first: dict[nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(param, name)
        if _owner(model, name) != _owner(model, source):
            tied[name] = source
    for name in tied:
        module, key = _owner(model, name)
        param = module.get_parameter(key)
        module._parameters[key] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    try:
        yield tied
    finally:
        for name, source in tied.items():
            module, key = _owner(model, name)
            module._parameters[key] = model.get_parameter(source)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and the parameter's name in it."""
    prefix, _, key = name.rpartition(".")
    return model.get_submodule(prefix), key
