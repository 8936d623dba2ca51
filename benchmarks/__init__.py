"""pgsub and the server's own subscriber side by side on one machine, in one run: ``make bench``."""
