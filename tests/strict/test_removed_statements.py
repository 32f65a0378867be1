"""The strict device finds a missing wait. `make mutations` tries all statements: [Note: removed statements]."""

import pytest
import removed_statements

REMOVED = (
    "accelerator: self.current_stream().wait_event(event)",
    pytest.param("accelerator: event.synchronize()", marks=pytest.mark.slow),
    pytest.param("chunk: wait(self.writer)", marks=pytest.mark.slow),
    pytest.param("streamed_update: self.accelerator.order(used)", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("removed", REMOVED)
def test_a_removed_statement_is_noticed(removed):
    found = [each for each in removed_statements.statements() if f"{each[0].split('.')[-1]}: {each[3]}" == removed]
    assert len(found) == 1, f"{len(found)} statements are {removed}"
    assert removed_statements.outcome(*found[0][:3], only="scenarios")
