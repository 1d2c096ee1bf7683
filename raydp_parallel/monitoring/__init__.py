"""Statistics, reports, advice and metrics of executors. Nothing here calls an executor."""
