"""Table synchronization: copy of a table at its slot's snapshot, catch-up, hand-over to apply."""
