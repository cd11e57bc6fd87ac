"""Ways to know who somebody is, one file each."""
