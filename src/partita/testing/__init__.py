"""Builders, fakes and conformance suites that authors of plug-ins may import."""
