"""What a training step costs: networks, compressors and backward passes as numbers, and their sum.

`network` has the cost of collectives, `methods` that of compressors, `timeline` says when gradients
are there, `events` puts the three together. Measured numbers go in; nothing here guesses one.
"""
