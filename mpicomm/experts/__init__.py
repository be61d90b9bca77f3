"""Mixture of experts: tokens go to the ranks of their experts, and the results come back."""
