"""Sensorium trains models that see, hear and act, by reinforcement learning."""

__version__ = "0.1.0"
