"""What runs on a rank: request states, the local batch, the model and its cache."""
