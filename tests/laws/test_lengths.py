"""Law: batches of many lengths train within one tiny budget, whatever was imported or planned before."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar.testing import ReferenceTrainer, assert_same_bits

VOCABULARY = 256


def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=VOCABULARY, use_cache=False, **heads)
    ).train()


def batch(length, seed):
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train(trainer, lengths):
    for seed, length in enumerate(lengths):
        trainer.backward(trainer(**batch(length, seed)).loss)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def run(lengths, planned, device_memory):
    """Train in a budget that does not hold all parameters beside the longest batch; compare with plain PyTorch."""
    config = ps.Config(device="cpu", precision="fp32", device_memory=device_memory, host_memory="16MiB")
    engine, _ = ps.initialize(llama, config, sample=batch(max(lengths), 0))
    if planned:
        engine.plan(**batch(max(lengths), 0))
    train(engine, lengths)
    train(reference := ReferenceTrainer(llama, config), lengths)
    assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
    assert engine.stats.total.evictions > 0, "the budget holds everything, so that nothing was tested"


@pytest.mark.parametrize("planned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_many_lengths(count, planned):
    choice, lengths = random.Random(count), [*range(8, 8 + count)]
    lengths += lengths if count == 16 else [choice.randrange(8, 72) for _ in range(436)]
    choice.shuffle(lengths)
    run(lengths, planned, "1600KiB" if count == 16 else "4MiB")
