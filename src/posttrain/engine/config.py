"""What a training or evaluation job reads. No torch."""
