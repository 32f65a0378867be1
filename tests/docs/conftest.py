"""Pages run as integration tests do: without downloads, on one thread, and no engine outlives its page."""

from integrations.conftest import _alone, _close_engines  # noqa: F401
