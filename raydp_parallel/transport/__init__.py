"""Messages between the driver and a replica, and how their bytes are sent."""
