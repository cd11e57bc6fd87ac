"""`python -m posttrain` and the `posttrain` command begin here, so that Ctrl-C while it loads is one line too."""

import sys

_INTERRUPTED = 130  # 128 + SIGINT: nothing was done yet


def main() -> None:
    """Load the commands and run the one that was typed."""
    if _verb(sys.argv[1:]) == "serve":  # before anything is loaded: its environment has the keys of store and ledger
        from posttrain.execution.processes import close_to_others

        close_to_others()
    try:
        from posttrain.cli.main import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(_INTERRUPTED) from None
    run_command()


def _verb(words: list[str]) -> str:
    """Which one was typed, behind the options that have a value; empty: none."""
    left = iter(words)
    for word in left:
        if word in ("--server", "--project"):
            next(left, None)
        elif not word.startswith("-"):
            return word
    return ""


if __name__ == "__main__":
    main()
