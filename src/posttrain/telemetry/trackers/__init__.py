"""Back-ends of the `Tracker` port, one file each."""
