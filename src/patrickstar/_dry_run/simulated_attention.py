"""Attention in a dry run: the kernel that a device would choose."""

import torch


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of attention as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def attention_on(
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention by the kernel of this type of device; arguments of `scaled_dot_product_attention` follow."""
    # These kernels read keys and values with fewer heads as they are; that of the CPU computes no gradient of a mask.
    aten = torch.ops.aten
    learned = attn_mask is not None and attn_mask.requires_grad
    if device_type == "cpu" and dropout_p == 0.0 and not learned:
        mask = attn_mask if attn_mask is None else _additive(attn_mask, query.dtype)
        out: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
        return out
    if device_type == "cuda" and attn_mask is None:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if device_type == "cuda" and attn_mask is not None and not enable_gqa:
        bias = _additive(attn_mask, query.dtype).expand(*query.shape[:-1], key.shape[-2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
        return out
    return torch._C._nn.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
