"""What of a module travels to its replicas, and what of it changed since."""
