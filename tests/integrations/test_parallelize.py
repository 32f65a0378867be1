"""transformers' plans: which parameters become DTensors, and what is refused. Nothing is sent."""

import inspect

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import expert_parallel, tensor_parallel

from patrickstar.errors import ConfigError, ModelError
from patrickstar.integrations.transformers import parallelize
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta

from .fake_processes import fake_processes
from .tiny import EXPERTS, SIZES

LLAMA = transformers.LlamaConfig(**SIZES)
TIED = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
MIXTRAL = transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4)
SIX_EXPERTS = transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=6)
GPT2 = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=16)


@pytest.fixture(autouse=True)
def _joined():
    with fake_processes(4):
        yield


def on_meta(config):
    with parameters_on_meta():
        return build_model(config, transformers.AutoModelForCausalLM)


def mesh(size=2, name="tp"):
    return init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("data", name))[name]


def placements(model):
    """Return the placement of each DTensor of the first layer, and of those outside of layers."""
    return {
        name.removeprefix("model.").removeprefix("layers.0."): param.placements[0]
        for name, param in model.named_parameters()
        if isinstance(param, DTensor) and "layers.1" not in name
    }


DENSE = {f"self_attn.{name}_proj.weight": Shard(0) for name in "qkv"} | {"self_attn.o_proj.weight": Shard(1)}
DENSE |= {"embed_tokens.weight": Shard(0), "lm_head.weight": Shard(0)}
FEED = {"mlp.gate_proj.weight": Shard(0), "mlp.up_proj.weight": Shard(0), "mlp.down_proj.weight": Shard(1)}


def test_the_functions_of_transformers_are_as_they_were():
    """If this fails, transformers has changed how plans are applied: compare its `maybe_distribute_model`."""
    expected = {
        PreTrainedModel._expand_parallel_plan: ["self", "plan"],
        tensor_parallel.apply_tensor_parallelism: ["model", "tp_mesh", "tp_plan"],
        expert_parallel.apply_expert_parallelism: ["model", "ep_mesh", "tp_mesh", "plan", "ep_implementation"],
    }
    for function, arguments in expected.items():
        assert list(inspect.signature(function).parameters) == arguments, function.__qualname__
    source = inspect.getsource(PreTrainedModel.maybe_distribute_model)
    for function in ("apply_tensor_parallelism(model, ", "apply_expert_parallelism(", "apply_fully_sharded_data"):
        assert source.count(function) == 1, f"maybe_distribute_model calls {function} in another way"
    assert PreTrainedModel.tp_plan.fset is not None and PreTrainedModel.ep_plan.fset is not None
    model = on_meta(MIXTRAL)
    assert model._expand_parallel_plan({"model.layers.*.mlp.experts": "a", "lm_head": "b"}) == {
        f"model.layers.{layer}.mlp.experts{name}": "a"
        for layer in (0, 1)
        for name in (".gate_up_proj", ".down_proj", "")
    } | {"lm_head.weight": "b", "lm_head": "b"}


def test_tensor_parallelism_shards_what_the_plan_names():
    model = on_meta(LLAMA)
    parallelize(model, tp=mesh())
    assert placements(model) == DENSE | FEED
    for param in model.parameters():
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.is_meta
    assert model.lm_head.weight.shape == (96, 32) and model.lm_head.weight.to_local().shape == (48, 32)


@pytest.mark.parametrize("config", [TIED, LLAMA], ids=["tied", "untied"])
def test_tied_parameters_stay_tied(config):
    model = on_meta(config)
    parallelize(model, tp=mesh())
    assert isinstance(model.lm_head.weight, DTensor)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings
    assert ("lm_head.weight" in dict(model.named_parameters())) != config.tie_word_embeddings


def test_a_frozen_model_stays_frozen():
    model = on_meta(TIED).requires_grad_(False)
    parallelize(model, tp=mesh())
    assert not any(param.requires_grad for param in model.parameters())


def test_experts_are_sharded_by_tensors_or_by_experts():
    model = on_meta(MIXTRAL)
    parallelize(model, tp=mesh())
    sliced = {"mlp.experts.gate_up_proj": _StridedShard(1, split_factor=2), "mlp.experts.down_proj": Shard(2)}
    assert placements(model) == DENSE | sliced
    whole = {"mlp.experts.gate_up_proj": Shard(0), "mlp.experts.down_proj": Shard(0)}
    model = on_meta(MIXTRAL)
    parallelize(model, ep=mesh(4, "ep"))
    assert placements(model) == whole
    model = on_meta(MIXTRAL)
    parallelize(model, tp=mesh(2, "tp"), ep=mesh(4, "ep"))
    assert placements(model) == DENSE | whole
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.device_mesh.size() == 4 and experts.num_experts == 1


def test_a_mesh_of_one_process_changes_nothing():
    model = on_meta(MIXTRAL)
    parallelize(model, tp=mesh(1, "tp"), ep=mesh(1, "ep"))
    assert placements(model) == {}
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_rules_replace_those_of_the_model():
    model = on_meta(LLAMA)
    rules = {"lm_head": "replicate", "model.embed_tokens": "replicate", "model.layers.*.mlp.up_proj": "rowwise"}
    parallelize(model, tp=mesh(), tp_plan=rules)
    found = placements(model)
    assert found["mlp.up_proj.weight"] == Shard(1)
    assert found.keys() == (DENSE | FEED).keys() - {"lm_head.weight", "embed_tokens.weight"}
    model = on_meta(MIXTRAL)
    parallelize(model, tp=mesh(), ep=mesh(4, "ep"), tp_plan={})
    assert placements(model).keys() == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (GPT2, {"tp": 2}, "no tensor-parallel plan for GPT2LMHeadModel: .* PyTorch's parallelize_module"),
        (LLAMA, {"ep": 2}, "no expert-parallel plan for LlamaForCausalLM: pass ep_plan, or .* leave out ep"),
        (LLAMA, {"tp": 4}, r"'model\.layers\.0\.self_attn\.q_proj' computes 2 heads, which the 4 processes"),
        (LLAMA, {"tp": 2, "tp_plan": {"lm_head": "colums"}}, "tp_plan: there is no style 'colums', only .*"),
        (LLAMA, {"tp": 2, "tp_plan": {"head": "rowwise"}}, r"no module or parameter 'head'; .*\.layers\.\*\."),
        (SIX_EXPERTS, {"tp": 2, "ep": 4}, r"mlp\.experts\.gate_up_proj' has 6 experts, which the 4 processes of ep"),
    ],
)
def test_impossible_plans_are_refused(config, options, message):
    model = on_meta(config)
    before = dict(model.named_parameters())
    options = {key: mesh(value, key) if key in ("tp", "ep") else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        parallelize(model, **options)
    assert {name: id(param) for name, param in model.named_parameters()} == {k: id(v) for k, v in before.items()}


def test_different_rules_for_a_tied_parameter_are_refused():
    different = r"\(Shard\(dim=0\),\) as 'lm_head\.weight' and \(Shard\(dim=1\),\) as 'model\.e"
    with pytest.raises(ModelError, match=different):
        parallelize(on_meta(TIED), tp=mesh(), tp_plan={"model.embed_tokens": "embedding_colwise"})
    model = on_meta(TIED)
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(
        ModelError, match=r"rule 'colwise_gather_output' for 'lm_head\.weight' and none for 'model\.embed"
    ):
        parallelize(model, tp=mesh())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_meshes_that_do_not_fit_are_refused():
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    with pytest.raises(ConfigError, match=r"tp has 2 dimensions, .* pass one of them, as mesh\['tp'\]"):
        parallelize(on_meta(LLAMA), tp=two)
    with pytest.raises(ConfigError, match=r"ep has the ranks \[0, 2\] and only a part of \[0, 1\], those of tp"):
        parallelize(on_meta(MIXTRAL), tp=two["tp"], ep=two["data"])


def test_other_models_are_refused():
    with pytest.raises(ModelError, match="Linear is no model of transformers: use PyTorch's parallelize_module"):
        parallelize(nn.Linear(2, 2), tp=mesh())
    model = on_meta(LLAMA)
    parallelize(model, tp=mesh())
    with pytest.raises(ModelError, match=r"'model\.embed_tokens\.weight' is a DTensor already, \(Shard\(dim=0\),\) on"):
        parallelize(model, tp=mesh())


@pytest.mark.slow
def test_every_causal_model_with_a_plan_can_be_made_parallel():
    """Models whose default configuration transformers can build on the meta device; others need no plan of theirs."""
    transformers.logging.set_verbosity_error()
    parallel = {"tp": [], "ep": []}
    for config_class, model_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for kind in parallel:
            try:
                with torch.device("meta"):
                    model = model_class(config_class())
            except Exception:
                continue
            plan = model.tp_plan if kind == "tp" else model.ep_plan
            if not plan:
                continue
            try:
                parallelize(model, **{kind: mesh(2, kind)})
            except (ConfigError, ModelError) as error:
                assert any(text in str(error) for text in ("divide evenly", "are one parameter")), model_class.__name__
                continue
            assert any(isinstance(param, DTensor) for param in model.parameters()), model_class.__name__
            parallel[kind].append(model_class.__name__)
    assert len(parallel["tp"]) >= 100 and len(parallel["ep"]) >= 40
