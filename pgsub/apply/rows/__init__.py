"""Applies one change to one table: finds the table, decides whether to apply, and sends the statement.

Mirrors ``relation.c``, should_apply_changes_for_rel and apply_handle_insert, _update and _delete of ``worker.c``.
Nothing here commits. Entry points: :class:`~pgsub.apply.rows.relation_cache.RelationCache`,
:class:`~pgsub.apply.rows.table_state_filter.TableStateFilter`, :class:`~pgsub.apply.rows.writer.RowWriter`.
"""
