"""How calls and their bytes travel between the driver and a replica."""
