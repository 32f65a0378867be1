"""Names of language models, checked before the libraries that build them are loaded."""

from difflib import get_close_matches
from pathlib import Path

from patrickstar._models.open_models import OPEN_MODELS, find_open_model
from patrickstar._models.presets import EXPERT_PRESETS, MOE_PRESETS, SWITCH_PRESETS, TRAINED_PRESETS
from patrickstar.errors import ModelError


def refuse_unknown_model(name: str) -> None:
    """Raise ModelError if no language model is known by a name, and no file or folder has it as its path."""
    if name in TRAINED_PRESETS or Path(name).exists() or find_open_model(name) is not None:
        return
    raise ModelError(_unknown(name))


def _unknown(name: str) -> str:
    known = [*TRAINED_PRESETS, *OPEN_MODELS]
    if name in MOE_PRESETS:
        return (
            f"{name} is a preset of `patrickstar plan` only; to train experts, use "
            f"{', '.join((*EXPERT_PRESETS, *SWITCH_PRESETS))}, or a model's configuration or folder"
        )
    matches = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {matches[0]}?" if matches else f"the presets are {', '.join(known)}"
    return f"there is no model {name!r}: it is neither a preset nor a config file nor a model folder; {hint}"
