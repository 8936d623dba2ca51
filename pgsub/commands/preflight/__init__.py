"""The checks of both servers before anything is created. Mirrors the checks of CreateSubscription and more.

What the server refuses is refused here; what it only notices later (a missing column) is a warning, or an error with
``--strict``. Everything is read in bulk: a thousand tables cost a handful of round trips.
"""
