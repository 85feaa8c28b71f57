"""The one bounded cache in memory."""
