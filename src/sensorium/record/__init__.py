"""The record of a run: its directory, durable writes of rows and files, and the lock that one process holds."""
