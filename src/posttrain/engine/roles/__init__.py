"""The roles of a model in the dataflow: policy, reference."""
