"""Memory, operations and values of tensors without elements."""

import pytest
import torch

from patrickstar._dry_run.op_tracer import IntegerValues, TensorMeter, is_free, matrix_size, operations, touched_bytes


def test_memory_is_counted_until_its_last_tensor_is_freed():
    meter = TensorMeter()
    tensor = torch.empty(1000, device="meta")
    meter.track(tensor)
    view = tensor[:10]
    meter.track(view)
    assert meter.now(0) == meter.peak(0) == 4000
    del tensor
    assert meter.now(0) == 4000
    del view
    assert (meter.now(0), meter.peak(0)) == (0, 4000)
    meter.restart()
    assert meter.peak(0) == 0


def test_operations_of_matrix_products_and_bytes():
    one, other = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    product = torch.ops.aten.mm.default
    assert operations(product, (one, other), {}, one @ other) == 2 * 3 * 5 * 7
    assert matrix_size(product, (one, other)) == 3 and matrix_size(product, (one,)) is None
    assert touched_bytes((one, other), {}, one @ other) == 4 * (15 + 35 + 21)
    assert operations(torch.ops.aten.exp.default, (one,), {}, one) == 0
    heads = [torch.empty(1, count, 8, 16, device="meta") for count in (4, 2, 2)]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = attention(*heads, 0.0, True)
    assert operations(attention.default, (*heads, 0.0, True), {}, found) == 2 * 2 * 4 * 8 * 8 * 16, "of all heads"
    assert is_free(torch.ops.aten.view.default) and not is_free(product)


def test_values_of_integers_are_followed_until_one_is_unknown():
    values, aten = IntegerValues(TensorMeter()), torch.ops.aten
    meta = [torch.empty(4, dtype=torch.int64, device="meta") for _ in range(3)]
    values.follow(aten.arange.default, (4,), {"device": torch.device("meta")}, meta[0])
    values.follow(aten.add.Tensor, (meta[0], 1), {}, meta[1])
    total = torch.empty((), dtype=torch.int64, device="meta")
    values.follow(aten.sum.default, (meta[1],), {}, total)
    assert values.item(total) == 1 + 2 + 3 + 4
    values.follow(aten.mul.Tensor, (meta[1], torch.empty(4, device="meta", dtype=torch.int64)), {}, meta[2])
    with pytest.raises(NotImplementedError, match=r"value of a torch\.int64 tensor, known only in a real run"):
        values.item(meta[2])
