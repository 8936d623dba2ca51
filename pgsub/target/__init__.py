"""Everything said to the target database: sessions, the ledger, the relation map, COPY and statements."""
