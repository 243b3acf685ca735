"""`python -m mpicomp.bench`: what the network, the compressors and a training step cost here."""
