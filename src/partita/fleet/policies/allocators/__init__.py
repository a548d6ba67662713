"""Allocators: what each job gets, given an order; one file each."""
