"""``python -m patrickstar`` and the ``patrickstar`` command."""

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from patrickstar._cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'patrickstar[cli]'")
    app(prog_name="patrickstar")


if __name__ == "__main__":
    main()
