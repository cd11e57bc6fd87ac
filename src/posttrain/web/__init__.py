"""Pages and pictures for people, from data that public functions of other packages return."""
