"""Primitive skills: a robot arm picks, places and pushes things on a table, simulated by ManiSkill.

``skills`` reads what is asked for and moves the arm, ``environment`` shows, judges and pays.
"""

from sensorium.envs.primitive_skill.environment import PrimitiveSkills

__all__ = ["PrimitiveSkills"]
