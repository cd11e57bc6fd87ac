"""One module for each engine that can run a stage. These modules do not import each other."""
