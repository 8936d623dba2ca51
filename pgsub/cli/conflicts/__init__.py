"""Commands about conflicts: ``conflicts``, ``skip-lsn``, ``origin-advance``."""
