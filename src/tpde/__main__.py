"""`tpde`, and `python -m tpde`: Ctrl-C ends it without a traceback while it is still imported, too."""

import sys


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        from tpde.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # `tpde.cli.common.INTERRUPTED`, which may not be there yet


if __name__ == "__main__":
    main()
