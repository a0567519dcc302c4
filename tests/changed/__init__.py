"""What people do to a model: each change, and the untouched model that gives the same numbers, where there is one.

An adapter is its weights merged, a hook that adds a vector is a bias, a head that a hook zeroes has rows of zeros in
W_O. What a change makes of every answer can then be read off a model that nobody changed.
"""

from changed import adapters, configuration, hooks, running
from changed.change import CHANGES, Change, applied, names

LINES = (hooks, adapters, configuration, running)
"""Each adds its lines to the table when it is imported."""

__all__ = ["CHANGES", "Change", "applied", "names"]
