"""`python -m posttrain` and the `posttrain` command begin here, so that Ctrl-C while it loads is one line too."""

import sys

_INTERRUPTED = 130  # 128 + SIGINT: nothing was done yet


def main() -> None:
    """Load the commands and run the one that was typed."""
    try:
        from posttrain.cli.main import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(_INTERRUPTED) from None
    run_command()


if __name__ == "__main__":
    main()
