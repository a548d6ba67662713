"""The model zoo: published models by name, in plain torch, for real or on the meta device."""
