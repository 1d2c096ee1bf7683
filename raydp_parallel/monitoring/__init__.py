"""What was done, for people and for other programs. It is told, and asks for nothing."""
