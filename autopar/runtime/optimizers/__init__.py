"""The user's optimizer, run on the parts of the parameters that this rank updates, and its settings and state."""
