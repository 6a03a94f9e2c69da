"""The entry point of `telescope`, and of `python -m telescope_cli`.

It imports the command late: Ctrl-C during these imports ends the process without a traceback.
"""

import signal


def main() -> None:
    """Run the command line of this process, and end the process."""
    # The handlers of the command take its place. A signal that was ignored stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from telescope_cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
