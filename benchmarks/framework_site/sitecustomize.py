"""Start of each process of `framework_suites.py`: those of examples that a test launches, too."""

import importlib
import os
import traceback

LOST = {
    "trl.import_utils": ["is_joblib_available"],
    "trl.trainer.sft_trainer": ["_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"],
}
"""Names that TRL's stored tests import and later packages of TRL lack. Tests that call them fail."""


def lost(*args: object, **options: object) -> None:
    return None


def start() -> None:
    for module, names in LOST.items() if os.environ["FRAMEWORK"] == "trl" else ():
        for name in names:
            if not hasattr(importlib.import_module(module), name):
                setattr(importlib.import_module(module), name, lost)
    if os.environ.get("SUBSTITUTE"):
        importlib.import_module("framework_substitutes").substitute()
    if os.environ.get("FP32"):
        config = importlib.import_module("trl.trainer.base_config")._BaseConfig
        before = config.__post_init__

        def post_init(self: object) -> None:
            vars(self)["bf16"] = False
            before(self)

        config.__post_init__ = post_init


try:
    start()
except BaseException:
    # Python goes on without this module if it fails, and tests would then run with the framework's own classes.
    traceback.print_exc()
    os._exit(3)
