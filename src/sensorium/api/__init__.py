"""The Python API, for scripts and notebooks; ``import sensorium as sn``: ``sn.train``, ``sn.evaluate``, ``sn.load``."""
