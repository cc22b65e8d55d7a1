"""`python -m trainshed` is `trainshed`."""

import os
import sys
import threading


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        from trainshed.cli import run_cli
    except KeyboardInterrupt:  # Ctrl-C before anything has begun
        sys.exit(130)

    code = run_cli(sys.argv[1:])
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    if code == 130 and others:
        # After Ctrl-C nobody waits for a thread that waits for a server.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
