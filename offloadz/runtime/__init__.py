"""Doing: the lanes, actions and native loops that carry out a plan; how work overlaps is decided in `plan`, not here."""
