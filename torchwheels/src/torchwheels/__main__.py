"""`python -m torchwheels` is `torchwheels`."""

import signal


def main() -> None:
    """Runs the command line, whose imports take half a second: until then, Ctrl-C ends us without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torchwheels import cli

    cli.main()


if __name__ == "__main__":
    main()
