"""What was admitted, consumed and in flight: the data cursor of a training job."""
