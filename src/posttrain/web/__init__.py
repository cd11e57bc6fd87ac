"""Pages and pictures a person looks at; reads through public functions of the planes."""
