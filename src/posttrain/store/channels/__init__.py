"""One file per place where the objects of attempt channels are. They do not know each other."""
