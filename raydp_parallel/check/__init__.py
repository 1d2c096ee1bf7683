"""A check that users run: what this machine's devices compute, how fast, and what was not checked.

`python -m raydp_parallel.check` prints a table and can write it as JSON. Rows run in a child
process; if a row ends it, the rows after it run in a new one.
"""
