"""Doing: the lanes, actions and native loops that carry out a plan; what overlaps is decided in `plan`."""
