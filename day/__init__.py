"""A first user's day in an empty folder, from the wheel to a tracked and exported model: `make day`."""
