"""Facts on parameters that a model's modules give: those that only lookups read, and those that are read together."""

from torch import nn

from patrickstar._engine.param_init import lookup_weights, params_used_together


def test_embeddings_that_nothing_else_reads_and_those_that_are_tied():
    kinds = {"own": nn.Embedding(3, 4), "tied": nn.Embedding(3, 4), "bag": nn.EmbeddingBag(3, 4)}
    kinds |= {"renormed": nn.Embedding(3, 4, max_norm=1.0), "head": nn.Linear(4, 3, bias=False)}
    model = nn.ModuleDict(kinds)
    model["head"].weight = model["tied"].weight
    assert lookup_weights(model) == ({"own.weight"}, {"tied.weight"})


def test_parameters_of_a_module_are_read_together_and_those_of_attention_with_its_projection():
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1, bias=False))
    attention = {"1.in_proj_weight", "1.out_proj.weight"}
    assert params_used_together(model) == [set(), {"0.weight", "0.bias"}, attention, {"1.out_proj.weight"}]
