"""Options: what is accepted, and the one line that says what is wrong with the rest."""

from functools import partial

import pytest
import torch

from patrickstar.config import Config
from patrickstar.errors import ConfigError, DeviceError
from patrickstar.optim import SGD, Adam, AdamW, Lion, TorchOptimizer


def test_a_budget_is_all_there_is_to_choose_and_sizes_become_bytes():
    config = Config()
    assert (config.device, config.device_memory, config.host_memory, config.chunk_size) == ("auto", None, None, "auto")
    assert config.precision == "auto"
    assert config.optimizer == AdamW()
    assert config.activation_offload == 0
    config = Config(device_memory="2GiB", host_memory=12345, chunk_size="4 MiB")
    assert (config.device_memory, config.host_memory, config.chunk_size) == (2 * 1024**3, 12345, 4 * 1024**2)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert {precision: Config(precision=precision).compute_dtype for precision in dtypes} == dtypes


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"),
    [
        (Config, "zzz", None),
        (Config, "device_mem", "device_memory"),
        (Config, "hostmemory", "host_memory"),
        (Config, "precison", "precision"),
        (Config, "optimiser", "optimizer"),
        (Config, "chunksize", "chunk_size"),
        (Config, "offload_activations", "activation_offload"),
        (AdamW, "weightdecay", "weight_decay"),
        (AdamW, "beta", "betas"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_valid_one(kind, misspelt, meant):
    with pytest.raises(ConfigError) as caught:
        kind(**{misspelt: 1})
    message = str(caught.value)
    assert f"{kind.__name__} has no option {misspelt!r}" in message
    assert (f"; did you mean {meant!r}?" if meant else "Its options: ") in message
    assert all(name in message for name in kind.model_fields)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "option", "value", "words"),
    [
        (Config, "device_memory", "lots", "'lots' is not a size"),
        (Config, "device_memory", 0, "must be positive"),
        (Config, "host_memory", -1, "must be positive"),
        (Config, "host_memory", 1.5, ""),
        (Config, "chunk_size", "0 MiB", "must be positive"),
        (Config, "chunk_size", None, ""),
        (Config, "device_memory", "auto", ""),
        (Config, "host_memory", "auto", ""),
        (Config, "host_memory", "1" + "0" * 400 + "x", "is not a size"),
        (Config, "precision", "fp8", "'bf16', 'fp16' or 'fp32'"),
        (Config, "precision", torch.bfloat16, "'bf16', 'fp16' or 'fp32'"),
        (Config, "optimizer", "adam", ""),
        (Config, "optimizer", torch.optim.Adam([torch.zeros(1)]), "give the class, not an optimizer over parameters"),
        (Config, "optimizer", partial(torch.optim.Adam, [torch.zeros(1)]), ""),
        (Config, "optimizer", torch.nn.Linear, ""),
        (SGD, "lr", -1.0, "must not be negative"),
        (SGD, "momentum", -0.5, "must not be negative"),
        (Lion, "betas", (0.9, 1.0), "must be in [0, 1)"),
        (Config, "activation_offload", "perhaps", ""),
        (Config, "device", 0, ""),
        (Adam, "lr", -1e-3, "must not be negative, got -0.001"),
        (Adam, "lr", float("nan"), "must not be negative, got nan"),
        (Adam, "lr", "fast", ""),
        (AdamW, "eps", -1e-8, "must not be negative"),
        (AdamW, "weight_decay", -0.1, "must not be negative"),
        (Adam, "betas", (0.9, 1.0), "must be in [0, 1), got (0.9, 1.0)"),
        (Adam, "betas", (-0.1, 0.9), "must be in [0, 1)"),
        (Adam, "betas", (0.9,), ""),
        (Adam, "betas", (0.9, float("nan")), "must be in [0, 1)"),
        (Adam, "param_groups", [{"params": []}], ""),
    ],
)
def test_a_bad_value_is_named_in_one_line(kind, option, value, words):
    with pytest.raises(ConfigError) as caught:
        kind(**{option: value})
    message = str(caught.value)
    assert message.startswith(f"{kind.__name__}: {option}")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("optimizer", "kind", "options", "states"),
    [
        (torch.optim.Adam, torch.optim.Adam, {}, ("exp_avg", "exp_avg_sq")),
        (partial(torch.optim.RMSprop, lr=0.1), torch.optim.RMSprop, {"lr": 0.1}, ("square_avg",)),
    ],
    ids=["a class", "a partial"],
)
def test_a_class_of_torch_may_be_given(optimizer, kind, options, states):
    found = Config(optimizer=optimizer).optimizer
    assert isinstance(found, TorchOptimizer)
    assert (found.kind, found.options, found.states) == (kind, options, states)
    assert found == TorchOptimizer(kind=kind, options=options)
    assert found.defaults()["lr"] == options.get("lr", 1e-3)


OF_TORCH = {
    "an unknown option": (partial(torch.optim.Adam, momentum=0.9), r"Adam\(.*momentum=0.9.*unexpected keyword"),
    "a value out of range": (partial(torch.optim.SGD, lr=-1.0), r"SGD\(.*lr=-1.0.*Invalid learning rate"),
    "not element-wise": (torch.optim.LBFGS, "LBFGS"),
}
NESTEROV = "nesterov=True needs momentum, and dampening=0"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        *((Config, {"optimizer": optimizer}, words) for optimizer, words in OF_TORCH.values()),
        (Config, {"precision": "int4", "activation_offload": "perhaps"}, r"precision.*activation_offload"),
        (SGD, {"nesterov": True}, NESTEROV),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, NESTEROV),
    ],
    ids=[*OF_TORCH, "several bad values", "Nesterov's momentum without one", "with dampening"],
)
def test_what_does_not_go_together_is_named_in_one_line(kind, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        kind(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Config, Adam, AdamW])
def test_options_can_not_be_changed_afterwards(kind):
    options = kind()
    name = next(iter(kind.model_fields))
    with pytest.raises(ConfigError, match=r"can.t be changed.*model_copy"):
        setattr(options, name, getattr(options, name))


def test_an_optimizer_keeps_its_kind_and_its_defaults_are_torchs():
    of_adam = ("lr", "betas", "eps", "weight_decay")
    of_sgd = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    for kind, names in ((Adam, of_adam), (AdamW, of_adam), (SGD, of_sgd)):
        defaults = getattr(torch.optim, kind.__name__)([torch.zeros(1)]).defaults
        assert {name: getattr(kind(), name) for name in names} == {name: defaults[name] for name in names}
        assert type(Config(optimizer=kind()).optimizer) is kind
    assert Config(optimizer=AdamW()).optimizer.decoupled
    assert not Config(optimizer=Adam()).optimizer.decoupled


@pytest.fixture
def cuda(monkeypatch):
    """Return a function that sets how many CUDA devices this machine has."""

    def has(count):
        found = torch.device("cuda") if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    return has


def test_the_device_that_is_there(cuda):
    of_two = {"auto": "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
    for count, names in ((0, {"cpu": "cpu", "auto": "cpu"}), (2, of_two)):
        cuda(count)
        assert {name: str(Config(device=name).find_device()) for name in names} == names


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 3, 3), (1, 3, 0), (2, 3, 1), (8, 0, 0)])
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_process_of_a_machine_takes_a_device_that_it_sees(cuda, monkeypatch, count, local_rank, index, name):
    """Some launchers show each process one GPU alone, and number the processes all the same."""
    cuda(count)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert Config(device=name).find_device() == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("count", "name", "words"),
    [
        *((0, name, "finds 0 cuda devices here; use 'cpu'") for name in ("cuda", "cuda:0")),
        (2, "cuda:2", "finds 2 cuda devices"),
        *((0, name, "is not supported") for name in ("mps", "meta")),
        *((0, name, "unknown device") for name in ("tpu", "", "cuda:x", "GPU")),
    ],
)
def test_a_device_that_is_not_there_is_named(cuda, count, name, words):
    cuda(count)
    with pytest.raises(DeviceError) as caught:
        Config(device=name).find_device()
    assert repr(name) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
