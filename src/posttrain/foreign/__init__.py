"""What other trainers' files ask for, as a run.yaml. Pure: files are read by the caller's word, nothing is executed."""
