"""The costs, measured against floors and peers. Each file answers one question: `python -m
benchmarks.<name>`.
"""
