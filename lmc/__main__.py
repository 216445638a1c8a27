"""`python -m lmc` is the command `lmc`."""

import sys

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def main() -> None:
    """Run the command `lmc`. Ctrl-C during its imports ends it without a traceback."""
    try:
        from lmc.commands.cli import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
