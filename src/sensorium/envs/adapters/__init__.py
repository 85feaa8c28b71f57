"""Environments written for other systems, played here through thin adapters: Gymnasium, slime, VAGEN, OpenEnv."""
