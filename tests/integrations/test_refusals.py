"""Refusals of what does not fit, with settings that suffice: followed once, the step runs."""

import random
import re

import numpy as np
import pytest
import torch
from sampling import nightly
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps

IDS = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))
SAMPLE = {"input_ids": IDS, "labels": IDS}
ROOM = 200 << 20


def gpt():
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=2048, use_cache=False, **ends)
    return GPT2LMHeadModel(config).train()


def options(**more):
    return ps.Config(device="cpu", precision="fp32", **{"device_memory": 4 << 20, "host_memory": ROOM} | more)


def train(build, config, sample=SAMPLE, *, before=None, passes=1):
    torch.manual_seed(0)
    engine, _ = ps.initialize(build, config, sample=before)
    try:
        for _ in range(3 if nightly() else 2):
            for left in reversed(range(passes)):
                engine.backward(engine(**sample).loss, accumulate=left > 0)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return engine.state_dict()
    finally:
        engine.close(keep=False)


def follow(setting, less, tmp_path):
    """Train as one named setting says."""
    build, config, sample, passes = gpt, options(**less), SAMPLE, 1
    if match := re.fullmatch(r"(device_memory|host_memory)='(\d+MiB)'", setting):
        config = options(**less | {match[1]: match[2]})
    elif setting == "disk=ps.Disk(directory)":
        config = options(**less, disk=tmp_path)
    elif setting == "activation_offload=True":
        config = options(**less, activation_offload=True)
    elif match := re.fullmatch(r"(?:(\d+) passes per step with )?a batch of (\d+) in place of 4", setting):
        sample = {name: value[: int(match[2])] for name, value in SAMPLE.items()}
        passes = int(match[1] or 1)
    else:
        assert setting == "activation_checkpointing=True"
        config = options(**less, activation_checkpointing=True)

    return train(build, config, sample, passes=passes)


def settings_of(message):
    named = re.search(r"Each of these alone is enough, verified by dry runs: (.*?)\. The dry run", message)
    return named[1].split("; ")


LESS = {
    "device": {},
    "activations": {"device_memory": 12 << 20},
    "host": {"device_memory": 8 << 20, "host_memory": 9 << 20},
}


@pytest.mark.parametrize("less", LESS)
def test_every_named_setting_suffices(less, tmp_path):
    with pytest.raises(ps.errors.BudgetError, match="this training step does not fit") as refused:
        train(gpt, options(**LESS[less]), before=SAMPLE)
    assert re.search(
        r"are missing, in (module '[\w.]+'|the model) \(\w+\); later ones may lack more\. Each", str(refused.value)
    )
    assert re.search(r"non-model data peaks at [\d.]+ MiB, in .*\(GPT2LMHeadModel\)$", str(refused.value))
    settings = settings_of(str(refused.value))
    assert settings[0].startswith("device_memory=")
    for setting in settings:
        follow(setting, LESS[less], tmp_path)


def test_without_a_sample_the_first_step_names_them(tmp_path):
    with pytest.raises(ps.errors.BudgetError, match="this training step does not fit") as refused:
        train(gpt, options())
    for setting in settings_of(str(refused.value)):
        follow(setting, {}, tmp_path)


def test_a_sample_that_fits_changes_nothing():
    config = options(device_memory=100 << 20)
    expected, found = train(gpt, config), train(gpt, config, before=SAMPLE)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("sample", [torch.zeros(99, 8), (torch.zeros(99, 8),), {"input": torch.zeros(99, 8)}])
def test_samples_of_any_form_and_losses_outside_of_the_model(sample):
    build = lambda: nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))  # noqa: E731
    config = options(device_memory=40_000)
    with pytest.raises(ps.errors.BudgetError, match="device_memory='1MiB'"):
        ps.initialize(build, config, sample=sample)
    ps.initialize(build, options(), sample=sample, loss=lambda out: out.square().mean())


@pytest.mark.parametrize(
    ("layers", "vocabulary", "sequence", "device_bytes"), [(1, 2048, 256, 16_971_791), (3, 512, 64, 2_520_675)]
)
def test_a_peak_inside_an_operator_refuses_the_first_step(layers, vocabulary, sequence, device_bytes):
    # Activations, alone or beside the operator's chunks, exceed the budget at a moment when no chunk is fetched.
    more = {"bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu_pytorch_tanh", "use_cache": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_layer=layers, n_embd=128, n_head=2, vocab_size=vocabulary, **more, **dropout)

    def build():
        model = GPT2LMHeadModel(config).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    ids = torch.zeros(4 if layers == 1 else 2, sequence, dtype=torch.int64)
    host_bytes = int(12 * sum(param.numel() for param in build().parameters()) * 1.4)
    engine, _ = ps.initialize(build, options(device_memory=device_bytes, host_memory=host_bytes))
    with pytest.raises(ps.errors.BudgetError, match=r"this training step does not fit.*Each of these alone is enough"):
        engine.backward(engine(input_ids=ids, labels=ids).loss)


def test_a_model_that_cannot_run_on_meta_tensors_is_not_refused():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) if float(x.sum()) >= 0 else x

    with pytest.warns(UserWarning, match="so the first step finds out what fits"):
        ps.initialize(Reads, options(), sample=torch.zeros(2, 8))


def test_a_model_that_does_not_fit_is_refused_before_it_is_built():
    built = []

    def build():
        built.append(torch.empty(0).device.type)
        return nn.Sequential(*(nn.Linear(1 << 15, 1 << 15) for _ in range(64)))

    with pytest.raises(ps.errors.BudgetError, match="the model data of 962"):
        ps.initialize(build, ps.Config(device="cpu", precision="bf16", device_memory="1GiB", host_memory="1GiB"))
    assert built == ["meta"]


def test_checks_leave_random_states_alone():
    def seed():
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(3)

    def build():
        width = random.choice([8, 16, 24, 32]) + int(np.random.randint(8))
        return nn.Linear(8, width)

    states = []
    for sample in (None, torch.zeros(2, 8)):
        seed()
        engine, _ = ps.initialize(build, options(), sample=sample)
        states.append(engine.state_dict())
        engine.close()
    seed()
    expected = build().state_dict()
    for state in states:
        assert all(torch.equal(expected[name], state[name]) for name in expected)
