"""The outer loop: records to batches, steps, checkpoints, metrics.  The only room that knows what a run is."""
