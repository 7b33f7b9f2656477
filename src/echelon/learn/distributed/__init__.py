"""Distributed runtime: process groups and device meshes."""
