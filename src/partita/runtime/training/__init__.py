"""The training loop of a user: steps, optimizers, batches as scripts read them, saving."""
