"""Pages and pictures for people, made from data that public functions in other packages return."""
