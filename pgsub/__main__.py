"""The entry point: the ``pgsub`` script and ``python -m pgsub``. It imports the program only inside :func:`main`."""

import sys


def main() -> None:
    """Run the program. If an interrupt comes while it is imported, end as quietly as it does itself."""
    try:
        from pgsub.cli.main import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)  # pgsub.cli.main.INTERRUPTED, whose module may not be imported yet


if __name__ == "__main__":
    main()
