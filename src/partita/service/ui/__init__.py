"""The page for the whole flow: its keys, documents, jobs, routes, and the modules that draw it."""
