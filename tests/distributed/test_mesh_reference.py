"""The reference for meshes: equal to one process on the concatenated batches, and the same bits in all processes."""

import pytest
import torch
import torch.distributed as dist
import toys
from sampling import nightly
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import patrickstar as ps
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes
from patrickstar.integrations.transformers import parallelize

from . import ranks
from .mesh_models import CHECKPOINTING, MODELS, Batch, batch
from .reference import MeshTrainer, gathered

# `eps` is large, so that a gradient that is zero but for rounding makes no step.
OPTIMIZER = ps.AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1)
CONFIG = ps.Config(device="cpu", precision="fp32", optimizer=OPTIMIZER)


def part(whole: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return this process's part of a whole parameter or gradient."""
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    assert found is not None and expected is not None, f"{what}: one of them does not exist"
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    scale = float(expected.abs().max()) + 1e-3 if expected.numel() else 0.0
    assert bool(((found - expected).abs() <= 2e-5 * scale).all()), what


def concatenated(number: int, count: int) -> Batch:
    """Return the batches of all processes as one."""
    ids, labels = zip(*(batch(number, data_rank) for data_rank in range(count)), strict=True)
    return torch.cat(ids), torch.cat(labels)


def compare(name: str, way: str, built: Meshes, max_norm: float | None) -> None:
    """Train the whole model, in every process, and the parallel one, and compare them after each backward and step."""
    model = MODELS[name]
    whole = ps.testing.ReferenceTrainer(model.whole(way), CONFIG)
    trainer = MeshTrainer(model.parallel(built, way), CONFIG, built.data)
    assert trainer.batches == 4 // model.tp
    params = dict(trainer.module.named_parameters())
    assert any(isinstance(param, DTensor) for param in params.values())
    for numbers in ((0, 1), (2,)):
        for number in numbers:
            expected = whole(*concatenated(number, trainer.batches))
            whole.backward(expected / len(numbers))
            with model.context():
                loss = trainer(*batch(number, trainer.data_rank))
                trainer.backward(loss / len(numbers), accumulate=number != numbers[-1])
            losses = loss.detach().clone()
            dist.all_reduce(losses)
            assert_close(losses / 4, expected.detach(), f"{name}: loss")
        if max_norm is None:
            whole.unscale()
            trainer.unscale()
        else:
            assert_close(trainer.clip_grad_norm_(max_norm), whole.clip_grad_norm_(max_norm), f"{name}: norm")
        for key, param in params.items():
            grad = whole.gradient(key)
            if grad is None:
                assert trainer.gradient(key) is None, key
            else:
                assert_close(trainer.gradient(key), part(grad, param), f"{name}: gradient of {key}")
        if "idle" in name:
            unused = all(not trainer.gradient(key).any() for key in params if ".experts." in key)
            assert sum(gathered(unused)) == 2, "all tokens choose the experts of two processes"
        for each in (whole, trainer):
            each.optimizer.step()
            each.optimizer.zero_grad()
    state, params = whole.state_dict(), dict(trainer.module.named_parameters(remove_duplicate=False))
    for key, value in trainer.state_dict().items():
        expected = part(state[key], params[key]) if key in params else state[key]
        assert_close(value, expected, f"{name}: {key}")


@ranks.joined
def cases(chosen: list[tuple[str, str]]) -> None:
    """Compare models with ways of checkpointing; runs in each of four processes."""
    for number, (name, way) in enumerate(chosen):
        max_norm = (None, 0.1)[number % 2]
        print(f"{name}, {way}: max_norm {max_norm}", flush=True)
        compare(name, way, MODELS[name].meshes(), max_norm)


def test_meshes_equal_one_process():
    names = [name for name in MODELS if name not in ("decoder, sequences", "decoder, losses")]  # one has both
    names = names if nightly() else ["decoder, both", "mixtral, idle tensors and experts"]
    ways = [CHECKPOINTING[number % len(CHECKPOINTING)] for number in range(len(names))]
    ranks.run(4, cases, chosen=list(zip(names, ways, strict=True)))


@ranks.joined
def same_bits(chosen: list[tuple[str, str, str, str]]) -> None:
    """Train in lower precision, and compare what processes have in common; runs in each of four processes."""
    for name, way, precision, reduce_dtype in chosen:
        print(f"{name}, {way}, {precision}, reduced in {reduce_dtype}", flush=True)
        model, built = MODELS[name], MODELS[name].meshes()
        config = CONFIG.model_copy(update={"precision": precision, "reduce_dtype": reduce_dtype})
        trainer = MeshTrainer(model.parallel(built, way), config, built.data)
        batches = [batch(number, trainer.data_rank) for number in range(4)]
        with model.context():
            seen = toys.train(trainer, batches, accumulation=2, max_norm=0.1, reduce_once=True)
        assert all(value.isfinite() for value in seen)
        dtypes = {param.dtype for param in trainer.module.parameters() if isinstance(param, DTensor)}
        assert dtypes == {config.compute_dtype}
        # Boxes that several processes hold, and the losses and norms of processes with one batch.
        held = {(trainer.names[param], trainer.boxes[param]): master for param, master in trainer.masters.items()}
        held |= {("losses and norms", trainer.data_rank): torch.stack([value.float() for value in seen])}
        alls = gathered(held)
        assert any(held.keys() & other.keys() for other in alls if other is not alls[dist.get_rank()])
        for other in alls:
            both = held.keys() & other.keys()
            mine, theirs = ({key: each[key] for key in both} for each in (held, other))
            ps.testing.assert_same_bits(mine, theirs, f"{name} in another process")


@pytest.mark.slow
def test_processes_have_the_same_bits():
    names = ["decoder, both", "llama tied", "qwen3", "mixtral", "mixtral, copies", "mixtral, tensors and experts"]
    names.append("switch")
    precisions = [("bf16", "16-bit"), ("fp16", "fp32"), ("bf16", "fp32")]
    ways = CHECKPOINTING * 2
    options = [(name, ways[number], *precisions[number // 2 % 3]) for number, name in enumerate(names)]
    ranks.run(4, same_bits, chosen=options)


@pytest.mark.slow
def test_meshes_equal_one_process_with_each_way_of_checkpointing():
    ranks.run(4, cases, chosen=[(name, way) for way in CHECKPOINTING for name in MODELS])


@ranks.in_processes(4)
def test_processes_with_plans():
    built = meshes(MeshSizes(4, 2, 4), "cpu")
    # One process's model has another seed: all are refused, whichever group they are in.
    model = MODELS["mixtral"].whole(seed=int(dist.get_rank() == 2)).model
    other_values = r"parameter 'model\.embed_tokens\.weight' has other values in other processes"
    with pytest.raises(ps.errors.ModelError, match=other_values):
        parallelize(model, tp=built.tp)
    # A process's part does not keep the memory of the whole parameter.
    model, whole = MODELS["mixtral, tensors and experts"].parallel(built), MODELS["mixtral"].whole()
    for name, param in model.named_parameters():
        part = getattr(param, "to_local", lambda param=param: param)()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size(), name
    # Without gradients transformers' layers run on local tensors: the loss is the same.
    ids, labels = batch(0, built.data.get_local_rank())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids, labels), whole.eval()(ids, labels))
