"""Reasons for which tests of frameworks fail with PatrickStar's classes, in a few words."""

import re

REASONS = {
    r"configure_optimizers returned \d+ optimizers": "refused by design: several optimizers",
    r"configure_optimizers returned no optimizer": "refused by design: fit() without an optimizer",
    r"can't update .*closure": "refused by design: an optimizer that needs a closure",
    r"can't update the elements": "refused by design: an optimizer that is not element-wise",
    r"MagicMock name='(backward|zero_grad)'": "counts calls of a torch function that the engine doesn't call",
    r"'world_size' of 'PatrickStarStrategy' object has no setter": "replaces an attribute of the strategy",
    r"isinstance\(<.*PatrickStarStrategy.*SingleDeviceStrategy": "asserts the class of the strategy",
    r"DID NOT RAISE MisconfigurationException.*|closure hasn't been executed": (
        "expects the error of an optimizer that drops its closure; the engine calls the closure itself"
    ),
    r"has trained before, and its states ended": "refused by design: the states of an optimizer end with its engine",
    r"At index \d+ diff: \{'name': '(Callback.on_after_)?backward'": (
        "expects a call of the module's method backward, in place of which the engine runs"
    ),
    r"KeyError: 'SLURM_NODEID'": "sets a part of Slurm's variables, of which strategies for several processes read all",
    r"there is no engine yet": "saves a checkpoint without fit(); there is no engine yet",
    r"IsADirectoryError|UnpicklingError: invalid load key, '<'": (
        "reads a checkpoint of training as a file (load_from_checkpoint); the strategy's is a folder"
    ),
    r"Actual: not called": "replaces Lightning's checkpoint plugin, which doesn't write the engine's checkpoints",
    r"Expected exception of type <class 'ValueError'>.*without its optimizer": (
        "refused by design, by another error: a model without its optimizer"
    ),
    r"1 models and 0 optimizers|without its optimizer": "refused by design: a model without its optimizer",
    r"0 models and 1 optimizers": "refused by design: an optimizer without its model",
    r"'random' == 'Linear'": "a user's hook for saving gets the model wrapped, as with DDP",
    r"KeyError: 'lr_lambdas'|!= \{'name': 'on_load_checkpoint'": (
        "callbacks are restored after on_fit_start, as with strategies that shard"
    ),
    r"torch\.bfloat16 == torch\.float16": (
        "model_init_kwargs has another precision than the arguments; the engine follows these"
    ),
    r"KeyError: '(model|transformer)\.": "names of the reference's parameters have a prefix, since it is wrapped",
    r"activations alone exceed the device budget": "does not fit into the budget",
}
"""What errors match, with the reason; the first match counts."""


def reason(error: str) -> str:
    """Return the reason for an error of a test."""
    for pattern, words in REASONS.items():
        if re.search(pattern, error, re.DOTALL):
            return words
    return "unexplained: " + error.strip().partition("\n")[0][:160].replace("|", "/")
