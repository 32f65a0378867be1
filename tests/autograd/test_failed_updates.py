"""After a failed update the chunks contain parameters, never gradients in their place."""

from dataclasses import dataclass, field

import pytest
import torch
from pydantic import Field
from toys import mean_square

import patrickstar as ps
from patrickstar import testing

from .zoo import mlp, normal_batches, small_chunks


@dataclass(frozen=True)
class BreaksOnce(ps.Rule):
    """Gradient descent that fails at the third parameter."""

    calls: list = field(hash=False)
    kinds = ()

    def apply(self, master, grad, states):
        self.calls.append(master.numel())
        if len(self.calls) == 3:
            raise RuntimeError("the third one")
        master.sub_(grad * 0.1)


class Breaking(ps.Optimizer):
    """Optimizer that uses `BreaksOnce`."""

    lr: float = 0.1
    calls: list = Field(default_factory=list)

    def rule(self, group, step, memory):
        return BreaksOnce(self.calls)


def test_the_engine_continues_with_valid_parameters():
    options = Breaking(calls=[])
    engine = testing.stressed(mlp, small_chunks("bf16", chunk_bytes=1 << 16, optimizer=options))
    before = engine.state_dict()
    (x,) = normal_batches(1)[0]
    engine.backward(mean_square(engine(x)))
    with pytest.raises(RuntimeError, match="the third one") as caught:
        engine.optimizer.step()
    assert any("chunk 0" in note and "updated in part" in note for note in caught.value.__notes__)
    assert not any(param.has_gradient for param in engine.inspect().parameters)
    engine.optimizer.zero_grad()
    after = engine.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 2
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach().clone(), after[name].bfloat16())
    engine.backward(mean_square(engine(x)))
    engine.optimizer.step()
    assert {param.steps for param in engine.inspect().parameters} == {1}
    engine.close()
