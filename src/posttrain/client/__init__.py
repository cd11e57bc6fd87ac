"""`Control` over HTTP: what a server answers, asked by the same verbs."""
