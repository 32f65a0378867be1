"""Identity of the launcher, by which a restarted run recognizes its own checkpoints."""

import os
import socket
from pathlib import Path

import psutil

_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets for the processes that it starts, and does not have itself."""


def find_agent() -> str | None:
    """Return an identifier of the torchrun agent that started this process; None without torchrun.

    An agent restarts the processes of its machine as long as it lives, so processes with the same agent belong to
    the same run. The identifier has the host, the process ID, and the time of its start in clock ticks since boot.
    """
    if _RUN_ID not in os.environ:
        return None
    for process in psutil.Process().parents():
        try:
            if _RUN_ID not in process.environ():  # a script between the agent and this process has the variable, too
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                return f"{socket.gethostname()}/{process.pid}/{fields[19]}"
        except (OSError, psutil.Error):  # of another user, or it has ended
            return None
    return None
