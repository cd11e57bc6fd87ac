"""Where events are delivered: a file each. They do not know each other."""
