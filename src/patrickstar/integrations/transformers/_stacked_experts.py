"""Experts of Switch Transformers as stacked parameters, which expert parallelism can shard."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

from patrickstar.errors import ModelError

# [Note: stacked experts]
# transformers shards experts that are one parameter per matrix, with the expert as first dimension, and whose forward
# takes the index and the weight of each token's experts. All its models with experts store them so, except
# Switch Transformers and NLLB-MoE, which have a module per expert. `StackedExperts` is the layer of Switch Transformers
# in that form. It knows nothing of processes: the plan that `stack_experts` gives to the model names transformers' own
# styles, which shard the parameters and exchange the tokens.


class StackedExperts(nn.Module):
    """Experts of one layer of Switch Transformers: two matrices, with an activation and dropout between them.

    Args:
        experts: The experts, all of one shape. Their parameters are copied, one matrix at a time.
    """

    export_advice = "take engine.state_dict() and copy each expert's rows of `wi` and `wo` to a model without stacks"
    """Advice for exports, which would have the names of this class."""

    def __init__(self, experts: SwitchTransformersExperts) -> None:
        super().__init__()
        modules: list[Any] = list(experts.values())
        self.num_experts = len(modules)
        self.act, self.dropout = modules[0].act, modules[0].dropout
        self.wi = _stack([module.wi.weight for module in modules])
        self.wo = _stack([module.wo.weight for module in modules])
        self.register_forward_pre_hook(_to_indices)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: Tokens, of shape (tokens, hidden).
            top_k_index: Experts of each token, integers of shape (tokens, chosen).
            top_k_weights: Weights of these experts, of shape (tokens, chosen).
        """
        output = torch.zeros_like(hidden_states)
        # Not `self.wi[expert]`, whose gradient is as large as the stack for each expert.
        for expert, (first, second) in enumerate(zip(self.wi.unbind(), self.wo.unbind(), strict=True)):
            token, choice = torch.where(top_k_index == expert)
            if not len(token):
                continue
            inner = self.dropout(self.act(nn.functional.linear(hidden_states[token], first)))
            values = nn.functional.linear(inner.to(second.dtype), second) * top_k_weights[token, choice, None]
            output.index_add_(0, token, values.to(output.dtype))
        return output


def stack_experts(model: PreTrainedModel) -> None:
    """Store the experts of each layer of a Switch Transformers model as one parameter per matrix, in place.

    The function of the model stays the same; names and shapes of the experts' parameters change. Afterwards
    `parallelize(model, ep=...)` can shard the experts. Call this before `patrickstar.initialize`, in runs with and
    without expert parallelism if checkpoints are exchanged between them.

    Args:
        model: The model, with parameters in memory or on the meta device.

    Raises:
        ModelError: No layer of the model has such experts.
    """
    replaced = [
        (name, module) for name, module in model.named_modules() if isinstance(module, SwitchTransformersExperts)
    ]
    if not replaced:
        raise ModelError(
            f"{type(model).__name__} has no experts of Switch Transformers to stack; other models of transformers are "
            f"stacked already, or have no experts"
        )
    rules: dict[str, str] = {}
    for name, module in replaced:
        model.set_submodule(name, StackedExperts(module))
        rule = replace_layer_number_by_wildcard(name)
        rules |= {f"{rule}.wi": "grouped_gemm", f"{rule}.wo": "grouped_gemm", rule: "ep_dispatch_experts"}
    model.ep_plan = rules  # type: ignore[misc]  # its setter is hidden from mypy by the other plans' between them


def _stack(weights: list[nn.Parameter]) -> nn.Parameter:
    first = weights[0]
    stacked = torch.empty(len(weights), *first.shape, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for row, weight in zip(stacked, weights, strict=True):
            row.copy_(weight)
    return nn.Parameter(stacked, requires_grad=first.requires_grad)


def _to_indices(module: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Convert the router's choice, one-hot of shape (tokens, 1, experts), to indices.

    A token beyond its expert's capacity has no one in its row. It gets the weight zero.
    """
    hidden_states, chosen, weights = args
    return hidden_states, chosen.argmax(-1), weights.masked_fill(~chosen.any(-1), 0.0)
