"""What of a module is sent to its replicas, and what of it changed since."""
