"""One module for each place where a job can run. These modules do not import each other."""
