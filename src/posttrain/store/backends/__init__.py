"""One file per blob back-end. They do not know each other."""
