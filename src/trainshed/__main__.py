"""`python -m trainshed` is `trainshed`."""

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    from trainshed.cli import run_cli

    sys.exit(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
