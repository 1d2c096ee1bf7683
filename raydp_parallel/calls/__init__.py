"""One forward and one backward, seen from the driver."""
