"""Forwards without gradients are planned: a generation keeps what fits and streams the rest, with the same bits."""

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from probes import manager_of, tracer_of
from seeded import engine_of
from torch import nn
from toys import train
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps

from .tiers import blocks, inputs, small_engine

TOKENS = 4
CHUNK_BYTES = 64 << 10


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=6, n_embd=96, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def with_adapters() -> nn.Module:
    return get_peft_model(
        gpt2(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=True)
    ).eval()


def config(folder, **options) -> ps.Config:
    budgets = {"device_memory": 12 * CHUNK_BYTES, "host_memory": "3MiB", "chunk_size": CHUNK_BYTES}
    return ps.Config(device="cpu", precision="fp32", disk=str(folder), **budgets | options)


def generated(module: nn.Module, seed: int = 0, length: int = 8) -> torch.Tensor:
    prompt = torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(prompt)
    with torch.no_grad():
        return module.generate(
            input_ids=prompt, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )


def record_passes(engine: ps.Engine, module: nn.Module) -> list[int]:
    """Return a list to which each forward of a module appends the bytes that it copies to the device."""
    counters, passes = manager_of(engine).counters, []
    module.register_forward_pre_hook(lambda *args: passes.append(-counters.h2d_bytes))
    module.register_forward_hook(lambda *args: passes.append(passes.pop() + counters.h2d_bytes))
    return passes


def test_a_token_moves_what_exceeds_the_budget_and_one_of_a_copied_model_nothing(tmp_path):
    """The budget holds some chunks for good, and those of two operators: one that runs, and the next."""
    expected = generated(gpt2())
    with ps.Engine(gpt2, config(tmp_path), meter=ps.testing.NoMeter()) as engine:
        passes = record_passes(engine, engine.module)
        ps.testing.assert_same_bits(expected, generated(engine.module), "tokens")
        ps.testing.assert_same_bits(expected, generated(engine.module), "tokens of the second generation")
        chunks = manager_of(engine).param16.values()
        lacking = sum(chunk.nbytes for chunk in chunks) - 12 * CHUNK_BYTES
        assert lacking > 8 * CHUNK_BYTES, "the model exceeds the budget"
        largest = max(chunk.nbytes for chunk in chunks)
        moments = [moment for trace in tracer_of(engine).evaluation_traces.values() for moment in trace.moments]
        sizes = {chunk.index: chunk.nbytes for chunk in chunks}
        together = max(sum(sizes[index] for index in moment.chunks) for moment in moments)
        assert max(passes[-TOKENS + 2 :]) <= lacking + 2 * together + largest
        copied, moved = copy.deepcopy(engine.module), manager_of(engine).counters.h2d_bytes
        ps.testing.assert_same_bits(expected, generated(copied), "tokens of a copy of the model")
        assert manager_of(engine).counters.h2d_bytes == moved, "copies generate alone"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("build", [gpt2, with_adapters], ids=["GPT-2", "adapters"])
def test_generation_between_steps_changes_no_bit(tmp_path, build: Callable[[], nn.Module]):
    """Training with generations, of several lengths, has the bits of training without."""

    def run(engine: ps.Engine, generates: bool) -> list[torch.Tensor]:
        results = []
        for step in range(3):
            ids = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = engine(input_ids=ids, labels=ids).loss
            if generates:
                generated(engine.module, step, 8 + step % 2)  # in the middle of a step
            engine.backward(loss)
            engine.optimizer.step()
            if generates:
                generated(engine.module, step, 8 + step % 2)
            results.append(loss.detach())
        return [*results, *engine.state_dict().values()]

    found = []
    for generates in (False, True):
        folder = tmp_path / str(generates)
        folder.mkdir()
        with engine_of(build, config(folder, optimizer=ps.AdamW(lr=1e-3))) as engine:
            found.append(run(engine, generates))
    ps.testing.assert_same_bits(*found, "losses and parameters")


def test_evaluations_are_planned_from_the_second_on(tmp_path):
    plain = blocks(12)
    with small_engine(lambda: copy.deepcopy(plain), config(tmp_path, device_memory=80_000, chunk_size=9000)) as engine:
        for batch in inputs(4):
            with torch.no_grad():
                ps.testing.assert_same_bits(plain(*batch), engine(*batch), "outputs")
        assert manager_of(engine).counters.h2d_bytes > 0
        train(engine, inputs(1))


def test_a_failed_forward_ends_its_evaluation(tmp_path):
    with ps.Engine(gpt2, config(tmp_path), meter=ps.testing.NoMeter()) as engine:
        expected = generated(engine.module)
        block = engine.module.transformer.h[3]
        failing = block.register_forward_pre_hook(lambda *args: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                generated(engine.module)
        failing.remove()
        for _ in range(3):
            ps.testing.assert_same_bits(expected, generated(engine.module), "tokens after the failure")
        ids = torch.randint(1, 256, (2, 16))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.optimizer.step()
