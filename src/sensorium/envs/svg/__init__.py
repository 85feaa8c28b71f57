"""SVG: write the SVG code that draws a picture.

``checks`` refuses code that must not reach a renderer, ``renderer`` draws the rest in a process that can be killed,
``targets`` makes pictures from seeds, ``similarity`` compares them, and ``environment`` plays. Vision models that compare
them too are in ``models/picture_similarity.py``.
"""

from sensorium.envs.svg.environment import SvgDrawing

__all__ = ["SvgDrawing"]
