"""Back-ends of the `Tracker` port, each in a separate file."""
