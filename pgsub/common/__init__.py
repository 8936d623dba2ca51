"""Values and small helpers for all packages: the exception tree, connection strings, a subscription's definition.

Mirrors ``src/common`` and ``src/backend/utils/error``. Nothing here imports another package, opens a connection or
knows a worker. Entry points: :class:`~pgsub.common.errors.PgsubError`,
:class:`~pgsub.common.subscription.Subscription`.
"""
