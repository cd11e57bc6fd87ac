"""Back-ends of sinks, one file each. They do not depend on each other."""
