"""Other threads wait for the engine, while autograd's own thread acts for the one that waits for a backward."""

import pytest
import strict_device
import torch
from laws.test_threads import DATA, WIDTH, new_engine, train_beside_a_reader
from toys import mean_square, train

from patrickstar import testing


@pytest.mark.parametrize("seed", [1, 2])
def test_a_reader_sees_whole_steps_and_changes_nothing(seed):
    strict_device.configure(seed=seed)
    train_beside_a_reader("strict")


def train_with_a_hook(calls_engine: bool) -> list[torch.Tensor]:
    """Train with a hook that reads another parameter in autograd's thread; return its results and the parameters."""
    engine, norms = new_engine("strict"), []
    engine.module[0][0].weight.register_hook(lambda grad: norms.append(engine.module[1][0].weight.norm()))
    for (x,) in DATA:
        loss = mean_square(engine(x))
        engine.backward(loss) if calls_engine else loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    values = [*engine.state_dict().values(), *(norm.cpu() for norm in norms)]
    engine.close()
    return values


def test_a_backward_without_the_engine_is_held_by_autograds_thread():
    testing.assert_same_bits(train_with_a_hook(True), train_with_a_hook(False), "parameters and norms")


def test_a_backward_within_a_forward_ends():
    """The calling thread holds the engine, and waits in autograd."""
    engine = new_engine("strict")
    engine.module.register_forward_hook(
        lambda module, args, out: out + torch.autograd.grad(out.sum(), args[0], retain_graph=True)[0]
    )
    x = torch.ones(3, WIDTH, device="strict", requires_grad=True)
    assert all(loss.isfinite() for loss in train(engine, [(x,)] * 2))
    engine.close()
