"""Environments outside of this process: behind an environment service, or in a child process."""
