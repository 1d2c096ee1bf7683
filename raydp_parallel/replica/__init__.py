"""The far side: one replica, in a process of its own."""
