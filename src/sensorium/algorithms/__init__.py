"""Credit, losses, KL, aggregation, mismatch: pure tensor functions, one small file each. Imports torch only.

Axes: G episodes of a group, S sequences (episodes) of an update, N tokens the model wrote. Every function works on flat
token vectors and knows nothing of micro-batches: what depends on the whole update (counts, means) is computed over it
and passed in. Settings are keyword arguments named like the recipe's keys; a function takes those it needs.
"""
