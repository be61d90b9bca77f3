"""Matrix products with a collective before or after them, which overlap on GPUs."""
