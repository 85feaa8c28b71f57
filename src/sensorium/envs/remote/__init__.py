"""Environments outside of this process: behind an environment service, or in a child process of their own.

``wire`` says how messages, results and pictures travel, ``connection`` carries operations to a server, ``client`` knows
several servers, and ``environment`` is what an episode plays. ``isolated`` is one in a child process (``child``).
"""
