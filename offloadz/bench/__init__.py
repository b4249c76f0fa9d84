"""Measuring a box: what `offloadz bench` runs, and the machine file it writes.

Left to others: what a machine file may say and how it is read (`plan/catalogue.py`).  The trade-off: a minute of
measuring sees neither a drive's cache run full nor a processor grow hot; the file says how long it looked.
"""
