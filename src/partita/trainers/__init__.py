"""Other people's trainers: what they can run, their configurations written and read."""
