"""Operations and bytes of products with matrices of 4 bits."""

import torch
from bitsandbytes.functional import quantize_4bit

from patrickstar._dry_run.op_tracer import matrix_size, operations
from patrickstar._dry_run.packed_products import unpacked_bytes


def test_a_product_with_a_packed_matrix_counts_as_that_with_the_unpacked_one():
    rows, weight = torch.ones(2, 5, 64), torch.ones(128, 64)
    packed, state = quantize_4bit(weight, quant_type="nf4")
    product = torch.ops.bitsandbytes.gemm_4bit.default
    args = (rows, packed, state.shape, state.absmax, state.blocksize, state.quant_type)
    assert operations(product, args, {}, product(*args)) == 2 * 10 * 128 * 64
    assert matrix_size(product, args) == 10
    assert unpacked_bytes(product, args) == 128 * 64 // 2 + 4 * 128 * 64
    assert unpacked_bytes(torch.ops.aten.mm.default, (weight, weight)) == 0
