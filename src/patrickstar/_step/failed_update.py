"""Parameters whose update has failed."""

from collections.abc import Mapping

from patrickstar._kernels.update_rule import Rule
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData


def give_up(data: ModelData, rules: Mapping[ManagedParam, Rule], error: BaseException) -> None:
    """Reset the parameters of a failed update to the rounded masters, updated or not, and name them in the error."""
    for managed in rules:
        data.give_up(managed)
    error.add_note(
        f"The optimizer step failed while updating chunk {next(iter(rules)).location.chunk} "
        f"({', '.join(managed.name for managed in rules)}). These parameters may be updated in part, and their "
        f"gradients are lost. Load a checkpoint before training on."
    )
