"""`python -m sensorium` is the command `sensorium`, also where only the source is at hand."""

from sensorium.cli.main import entry

entry()
