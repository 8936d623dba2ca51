"""The command line: options, rendering, exit codes. Mirrors ``src/bin/psql`` and the other client programs."""
