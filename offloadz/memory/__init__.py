"""Where bytes live: the host pool, the disk tier and the flat buffers between them.

This room knows sizes, alignments, files and checksums.  It knows nothing of steps, lanes or models, nor how a transfer
is made: the object that moves bytes between a file and a buffer is handed in (`tier.Transfer`).  The trade-off: whole
pieces of 1 MiB are what is read, written and checked, so single rows cost a piece each.
"""
