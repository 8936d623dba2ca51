"""``python -m pgsub``: the same program as the ``pgsub`` script."""

from pgsub.cli.main import main

if __name__ == "__main__":
    main()
