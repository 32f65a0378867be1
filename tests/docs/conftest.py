"""Pages run as integration tests do: without downloads, on one thread, and no engine outlives its page."""

from fixed_machine import same_machine  # noqa: F401
from integrations.conftest import _alone, _close_engines, _fast_fp32, _new_accelerate  # noqa: F401
