"""A check that anyone can run: what this machine's devices compute, how fast, and what was not
looked at.

`python -m raydp_parallel.check` prints a table and can keep it as JSON. Every row is tried in a
process that may die over it: the next row goes on in another one.
"""
