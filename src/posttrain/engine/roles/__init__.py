"""What a model does in the dataflow: policy, reference."""
