"""The back-ends of attempt channels, one file each. They do not import each other."""
