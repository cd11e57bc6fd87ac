"""Pages and pictures for people; reads through public functions of the planes."""
