"""The program as a file, which spark-submit wants: see spark-submit.sh."""

import sys

from pgsub.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
