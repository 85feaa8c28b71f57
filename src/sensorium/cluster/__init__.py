"""A learner whose ranks are other processes: on this machine, or placed by Ray."""
