"""The workers of roles that learn or are frozen: policy, critic, reference and others."""
