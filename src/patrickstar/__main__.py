"""Entry point of ``python -m patrickstar`` and of the ``patrickstar`` command."""

import sys


def main() -> None:
    """Run the command line, or print how to install its dependencies."""
    try:
        from patrickstar._cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "tokenizers", "transformers", "typer"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install '.[cli]' in the clone of PatrickStar")
    app(prog_name="patrickstar")


if __name__ == "__main__":
    main()
