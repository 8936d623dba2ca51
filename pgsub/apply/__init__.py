"""The apply worker: transactions in, one target transaction for one or many of them, feedback out."""
