"""Diagnosis of machines and of the network between them."""
