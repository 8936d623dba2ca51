"""The checks of both servers before anything is created. Mirrors the checks of CreateSubscription, and adds some.

What the server refuses is refused here. What it notices only later, such as a missing column, is a warning, or an error
with ``--strict``. Catalogs are read in bulk: a thousand tables cost a handful of round trips.
"""
