"""The embedded pair of servers and a workload: for ``pgsub demo`` and for the tests, imported by nothing else."""
