"""Thinking: what would run, in which order, in how many bytes.  Imports no torch and reads no clock."""
