"""Messages of PyTorch's errors, shortened for our own."""


def first_line(error: BaseException) -> str:
    """Return an error's message without PyTorch's source location and advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if not lines[0].startswith("[/"):
        return lines[0]
    return lines[0].partition("] ")[2].partition(". ")[0]
