"""The model as a person knows it: its module, its files by name, and what is put in place of its blocks.

This room reads and writes Hugging Face directories and puts stand-ins where the blocks were; it leaves bytes, lanes and
updates to `runtime/` and `memory/`, and the outer loop to `train/`.  Its one trade-off: every tensor is moved in pieces
of a few MiB instead of whole, which costs a system call per piece and never holds a model, or a large table, in memory.
"""
