"""`Control` over HTTP: the same verbs, which a server carries out."""
