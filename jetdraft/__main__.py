"""The jetdraft command, also as `python -m jetdraft`."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C while click is imported prints one line too."""
    try:
        from jetdraft.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
